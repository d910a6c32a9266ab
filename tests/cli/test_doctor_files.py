"""``verl-padding doctor`` on files of prompts, folders that a job writes to, and checkpoints."""

import errno

import pytest
from verl.trainer.ppo.utils import create_rl_dataset

from tests.support.jobs_for_doctor import (
    FLAG,
    LFS_POINTER,
    LOOP,
    MESSAGES,
    SCORED,
    Kind,
    Machine,
    Reasons,
    assert_told,
    assert_tried_and_well,
    contents_of,
    findings_of,
    matters,
    prompts,
    with_settings,
)
from verl_padding.doctor.finding import Finding
from verl_padding.doctor.folders import folder_of_hydra, folders_of_job, paths_from_hydras_folder
from verl_padding.doctor.prompts import MOST_BYTES
from verl_padding.job.composition import JobArguments

ON_MEGATRON = ["actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron"]
NO_VALIDATION = ("trainer.val_before_train=false", "trainer.test_freq=-1")

pytestmark = pytest.mark.usefixtures("no_ray_cluster")


def _checkpoint(machine: Machine, *files: str) -> list[str]:
    folder = machine.folder / "global_step_7"
    folder.mkdir()
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"]


def no_training_file(machine: Machine) -> list[str]:
    return ["data.train_files=/nowhere/train.parquet"]


def no_validation_file(machine: Machine) -> list[str]:
    return ["data.val_files=/nowhere/val.parquet"]


def a_training_file_that_is_none(machine: Machine) -> list[str]:
    return [f"data.train_files={machine.file('train.parquet', 'no parquet')}"]


def too_few_prompts(machine: Machine) -> list[str]:
    return ["data.train_batch_size=64"]


def another_prompt_column(machine: Machine) -> list[str]:
    return ["data.prompt_key=question"]


def prompts_of_plain_text(machine: Machine) -> list[str]:
    return machine.data(prompts(16, prompt=["1+1"] * 16))


def prompts_of_another_form(machine: Machine) -> list[str]:
    return machine.data(prompts(16, prompt=[[{"from": "human", "value": "hi"}]] * 16))


def no_ground_truth(machine: Machine) -> list[str]:
    return machine.data(prompts(16).drop(columns="reward_model"))


def a_folder_of_data(machine: Machine) -> list[str]:
    return [f"data.train_files={machine.folder}"]


def a_checkpoint_folder_that_is_a_file(machine: Machine) -> list[str]:
    return [f"trainer.default_local_dir={machine.file('checkpoints')}"]


def a_long_folder_for_ray(machine: Machine) -> list[str]:
    machine.patch.setenv("RAY_TMPDIR", f"{machine.folder}/{'x' * 40}")
    return []


def a_long_folder_for_all_that_is_temporary(machine: Machine) -> list[str]:
    machine.patch.delenv("RAY_TMPDIR", raising=False)
    machine.patch.setenv("TMPDIR", f"{machine.folder}/{'x' * 40}")
    return []


def a_long_folder_in_the_settings_for_ray(machine: Machine) -> list[str]:
    return [f"+ray_kwargs.ray_init._temp_dir={machine.folder}/{'x' * 40}"]


def a_folder_for_ray_that_is_a_file(machine: Machine) -> list[str]:
    return [f"+ray_kwargs.ray_init._temp_dir={machine.file('ray')}"]


def no_folder_for_the_log(machine: Machine) -> list[str]:
    machine.patch.setenv("VERL_FILE_LOGGER_PATH", f"{machine.folder}/runs/metrics.jsonl")
    return []


def checkpoints_below_a_file(machine: Machine) -> list[str]:
    return [f"trainer.default_local_dir={machine.file('checkpoints')}/run"]


def no_checkpoint(machine: Machine) -> list[str]:
    return ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_7"]


def verls_own_prompts_that_are_nowhere(machine: Machine) -> list[str]:
    return ["data.train_files='~/data/rlhf/gsm8k/train.parquet'"]


def a_file_with_a_slash_at_its_end(machine: Machine) -> list[str]:
    (files,) = machine.data(prompts(16))
    return [f"{files}/"]


def a_file_in_the_home_folder(machine: Machine) -> list[str]:
    machine.data(prompts(16))
    machine.patch.setenv("HOME", str(machine.folder))
    return ["data.train_files='~/data.parquet'"]


def no_such_resume_mode(machine: Machine) -> list[str]:
    return ["trainer.resume_mode=always"]


def a_checkpoint_that_is_none(machine: Machine) -> list[str]:
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={machine.folder}"]


def a_latest_checkpoint_of_no_step(machine: Machine) -> list[str]:
    machine.file("latest_checkpointed_iteration.txt", "seven")
    return [f"trainer.default_local_dir={machine.folder}"]


def a_latest_checkpoint_of_more_ranks(machine: Machine) -> list[str]:
    a_checkpoint_of_more_ranks(machine)
    machine.file("latest_checkpointed_iteration.txt", "7")
    return [f"trainer.default_local_dir={machine.folder}"]


def laps_in_a_file(machine: Machine) -> list[str]:
    return ["padding.timing=true", f"padding.timing_dir={machine.file('timing')}"]


def _each_by_its_name(machine: Machine, kind: str) -> str:
    return f"data.train_files=[{machine.folder}/a.{kind},{machine.folder}/b.{kind}]"


def files_of_wide_rows_that_do_not_go_together(machine: Machine) -> list[str]:
    wide = {f"a_column_of_a_long_name_{number}": 0 for number in range(20)}
    for name, source in (("a", 1), ("b", "one")):
        prompts(8, data_source=source, extra_info=[wide] * 8).to_parquet(machine.folder / f"{name}.parquet")
    return [_each_by_its_name(machine, "parquet")]


def _two_files(machine: Machine, **columns_of_second: list) -> tuple[list[str], list[str]]:
    """Overrides of a job that names both files, and of one that names them by a pattern."""
    prompts(8, level=[1] * 8).to_parquet(machine.folder / "a.parquet")
    prompts(8, **columns_of_second).to_parquet(machine.folder / "b.parquet")
    return [_each_by_its_name(machine, "parquet")], [f"data.train_files={machine.folder}/*.parquet"]


def a_pattern_of_files_with_other_columns(machine: Machine) -> list[str]:
    return _two_files(machine, topic=["sums"] * 8, level=[None] * 8)[1]


def a_pattern_that_names_no_kind(machine: Machine) -> list[str]:
    prompts(16).to_parquet(machine.folder / "a.parquet")
    return [f"data.train_files={machine.folder}/a*"]


def files_that_do_not_go_together(machine: Machine) -> list[str]:
    for name, index in (("a", 1), ("b", "one")):
        prompts(8, extra_info=[{"index": index}] * 8).to_parquet(machine.folder / f"{name}.parquet")
    return [f"data.train_files={machine.folder}/*.parquet"]


def extra_info_of_text(machine: Machine) -> list[str]:
    return machine.data(prompts(16, extra_info=["hard"] * 16))


def truths_of_text(machine: Machine) -> list[str]:
    return machine.data(prompts(16, reward_model=['{"ground_truth": "2"}'] * 16))


def null_prompts_at_the_end(machine: Machine) -> list[str]:
    return machine.data(prompts(2000, prompt=[MESSAGES] * 1999 + [None]))


def lines_of_which_one_is_cut_off(machine: Machine) -> list[str]:
    whole = prompts(16).to_json(orient="records", lines=True)
    return [f"data.train_files={machine.file('train.jsonl', whole + whole[:20])}"]


def lines_without_prompts(machine: Machine) -> list[str]:
    lines = prompts(16).rename(columns={"prompt": "question"}).to_json(orient="records", lines=True)
    return [f"data.train_files={machine.file('train.jsonl', lines)}"]


def lines_that_are_too_few(machine: Machine) -> list[str]:
    lines = prompts(7).to_json(orient="records", lines=True)
    return [f"data.train_files={machine.file('train.jsonl', lines)}"]


def a_file_of_data_that_is_a_pointer(machine: Machine) -> list[str]:
    return [f"data.train_files={machine.file('train.parquet', LFS_POINTER)}"]


def nothing_to_validate_on(machine: Machine) -> list[str]:
    prompts(16).iloc[:0].to_parquet(machine.folder / "val.parquet")
    return [f"data.val_files={machine.folder}/val.parquet"]


def a_source_whose_score_takes_a_package(machine: Machine) -> list[str]:
    return machine.data(prompts(16, data_source=["hiyouga/geometry3k"] * 16))


def a_source_that_verl_has_no_score_for(machine: Machine) -> list[str]:
    return machine.data(prompts(16, data_source=["sums"] * 16))


def no_ground_truth_in_its_column(machine: Machine) -> list[str]:
    return machine.data(prompts(16, reward_model=[{"style": "rule", "answer": "2"}] * 16))


def parts_that_make_no_batch(machine: Machine) -> list[str]:
    return ["data.gen_batch_size=3"]


def an_experiment_in_a_folder(machine: Machine) -> list[str]:
    machine.patch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    return ["trainer.logger=[file]", "trainer.experiment_name=sums/first"]


def a_checkpoint_that_is_empty(machine: Machine) -> list[str]:
    return _checkpoint(machine)


def a_checkpoint_of_more_ranks(machine: Machine) -> list[str]:
    return _checkpoint(machine, *(f"actor/model_world_size_4_rank_{rank}.pt" for rank in range(4)))


def no_folder_for_checkpoints(machine: Machine) -> list[str]:
    return ["trainer.default_local_dir=null"]


def a_log_of_no_project(machine: Machine) -> list[str]:
    machine.patch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    return ["trainer.logger=[console,file]", "trainer.project_name=null"]


def a_board_that_is_a_file(machine: Machine) -> list[str]:
    machine.patch.setenv("TENSORBOARD_DIR", machine.file("board"))
    return ["trainer.logger=[console,tensorboard]"]


def a_checkpoint_without_its_critic(machine: Machine) -> list[str]:
    critic = ["critic.enable=true", f"critic.model.path={machine.tiny_model}"]
    return [*critic, *_checkpoint(machine, "actor/model_world_size_2_rank_0.pt")]


def a_checkpoint_without_its_optimizer(machine: Machine) -> list[str]:
    return _checkpoint(machine, "actor/model_world_size_2_rank_0.pt", "actor/extra_state_world_size_2_rank_0.pt")


def fewer_prompts_than_a_batch_for_some_steps(machine: Machine) -> list[str]:
    few = ["trainer.total_training_steps=2", "data.train_max_samples=7", "data.train_batch_size=8"]
    return ["trainer.v1.trainer_mode=colocate_async", *few, *machine.data(prompts(16))]


CANNOT_START: Reasons = {
    a_checkpoint_without_its_optimizer: (
        "actor_rollout_ref.actor.checkpoint.load_contents",
        "has no optimizer (optim_world_size_2_rank_0.pt). Leave it out of this list",
    ),
    fewer_prompts_than_a_batch_for_some_steps: ("data.train_batch_size", "so an epoch has no step, by which verl"),
    no_folder_for_checkpoints: ("trainer.default_local_dir", "null: verl looks there for a checkpoint"),
    a_log_of_no_project: ("trainer.project_name", "null: verl's file logger makes a folder of this name"),
    a_board_that_is_a_file: ("TENSORBOARD_DIR", "board is a file. Name another folder."),
    a_checkpoint_without_its_critic: ("trainer.resume_from_path", "has no folder named critic, and the job has one"),
    no_training_file: ("data.train_files", "/nowhere/train.parquet: there is no such file"),
    verls_own_prompts_that_are_nowhere: (
        "data.train_files",
        "~/data/rlhf/gsm8k/train.parquet: is the value of verl's own config, and not here. Name yours;",
    ),
    a_file_in_the_home_folder: (
        "data.train_files",
        "~/data.parquet: verl does not know what ~ is. Write the whole path",
    ),
    a_file_with_a_slash_at_its_end: ("data.train_files", ".parquet/: ends with a /, and verl takes no such path."),
    no_validation_file: ("data.val_files", "/nowhere/val.parquet: there is no such file"),
    a_training_file_that_is_none: ("data.train_files", "cannot be read"),
    too_few_prompts: ("data.train_batch_size", "64: the data set has 16 prompts"),
    another_prompt_column: ("data.train_files", "has no column 'question' (data.prompt_key), only prompt"),
    a_long_folder_for_ray: ("RAY_TMPDIR", "xx: too long a path for Ray, which makes sockets below it: theirs would"),
    a_long_folder_for_all_that_is_temporary: ("TMPDIR", "xx: too long a path for Ray, which makes sockets below it"),
    a_long_folder_in_the_settings_for_ray: ("ray_kwargs.ray_init._temp_dir", "xx: too long a path for Ray"),
    a_folder_for_ray_that_is_a_file: ("ray_kwargs.ray_init._temp_dir", "is a file. Name another folder"),
    no_folder_for_the_log: ("VERL_FILE_LOGGER_PATH", "its folder is not there"),
    checkpoints_below_a_file: ("trainer.default_local_dir", "checkpoints is a file"),
    no_checkpoint: ("trainer.resume_from_path", "/nowhere/global_step_7: there is no such folder"),
    prompts_of_plain_text: ("data.train_files", "its column 'prompt' holds text, and verl's agent loops take lists"),
    prompts_of_another_form: ("data.train_files", "its column 'prompt' holds lists of objects with from, value, and"),
    no_ground_truth: ("data.train_files", "has no column 'reward_model', which verl's reward managers read"),
    a_folder_of_data: ("data.train_files", "is a folder. Name the files in it: "),
    a_checkpoint_folder_that_is_a_file: ("trainer.default_local_dir", "is a file. Name another folder"),
    no_such_resume_mode: (
        "trainer.resume_mode",
        "always: verl resumes in no such way. Choices: auto, disable, resume_path",
    ),
    a_latest_checkpoint_of_no_step: ("trainer.default_local_dir", "'seven' is no step. Write the number of a"),
    a_checkpoint_that_is_none: ("trainer.resume_from_path", "not a checkpoint of verl"),
    laps_in_a_file: ("padding.timing_dir", "is a file. Name another folder"),
    files_of_wide_rows_that_do_not_go_together: ("data.train_files", "(expected either Value('int64') or"),
    a_pattern_that_names_no_kind: ("data.train_files", "/a*: verl's data set reads .parquet, .json, .jsonl only."),
    a_pattern_of_files_with_other_columns: ("data.train_files", "cannot read them together (CastError: "),
    files_that_do_not_go_together: ("data.train_files", "Write them anew, with the same columns of the same types."),
    extra_info_of_text: ("data.train_files", "prompt 0 has a text in its column 'extra_info', and verl takes a"),
    truths_of_text: ("data.train_files", "prompt 0 has a text in its column 'reward_model', and verl's reward"),
    null_prompts_at_the_end: ("data.train_files", "1 of 2000 prompts are null, and verl's data set ends with the job"),
    lines_of_which_one_is_cut_off: ("data.train_files", "train.jsonl: cannot be read ("),
    lines_without_prompts: ("data.train_files", "cannot make prompt 0 (KeyError: 'prompt')"),
    lines_that_are_too_few: ("data.train_batch_size", "8: the data set has 7 prompts"),
    a_file_of_data_that_is_a_pointer: ("data.train_files", "is a pointer of Git LFS, not the file itself"),
    nothing_to_validate_on: ("data.val_files", "there is no prompt, and verl makes a data loader"),
    a_source_that_verl_has_no_score_for: (
        "data.train_files",
        "its data_source is sums, and verl has no score for that.",
    ),
    a_source_whose_score_takes_a_package: (
        "data.train_files",
        "imports 'mathruler.grader', and there is no such module on Python's path (pip install mathruler?). Install it",
    ),
    no_ground_truth_in_its_column: (
        "data.train_files",
        "prompt 0 has no data_source, or no reward_model with a ground_truth",
    ),
    parts_that_make_no_batch: ("data.gen_batch_size", "3: does not divide data.train_batch_size=8"),
    an_experiment_in_a_folder: ("trainer.experiment_name", "sums/first: verl's file logger takes it for a file in"),
    a_checkpoint_that_is_empty: ("trainer.resume_from_path", "has no folder named actor, which verl loads"),
    a_latest_checkpoint_of_more_ranks: (
        "trainer.default_local_dir",
        ": global_step_7 in it, from which the job goes on, is of a job of 4 ranks, and this one has 2",
    ),
    a_checkpoint_of_more_ranks: ("trainer.resume_from_path", "is of a job of 4 ranks, and this one has 2"),
}
"""Why a job cannot start, or cannot end its first step -> the setting that is told, and part of what is."""


@pytest.mark.parametrize("reason", CANNOT_START, ids=lambda reason: reason.__name__)
def test_a_job_that_cannot_start_here_is_told_with_the_setting_that_is_why(reason, composed, machine):
    assert_told(contents_of(composed, reason(machine)), *CANNOT_START[reason])


def other_columns_in_each_file(machine: Machine) -> list[str]:
    return _two_files(machine, topic=["sums"] * 8, level=[None] * 8)[0]


def lines_of_json(machine: Machine) -> list[str]:
    lines = prompts(16).to_json(orient="records", lines=True)
    return [f"data.train_files={machine.file('train.jsonl', lines)}"]


def one_array_of_json(machine: Machine) -> list[str]:
    return [f"data.train_files={machine.file('train.json', prompts(16).to_json(orient='records'))}"]


def lines_that_name_their_loop(machine: Machine) -> list[str]:
    data = prompts(16, agent_name=["mine"] * 16, prompt=["1+1"] * 16).drop(columns=["reward_model"])
    lines = machine.file("train.jsonl", data.to_json(orient="records", lines=True))
    return [f"data.train_files={lines}", f"data.val_files={lines}", machine.loop(LOOP + SCORED)[0]]


def another_loop_for_files_that_are_never_used(machine: Machine) -> list[str]:
    prompts(16, agent_name=["nobodys"] * 16).to_parquet(machine.folder / "val.parquet")
    return [f"data.val_files={machine.folder}/val.parquet", "trainer.val_before_train=false", "trainer.test_freq=-1"]


def many_files(machine: Machine) -> list[str]:
    for number in range(20):
        prompts(100).to_parquet(machine.folder / f"{number}.parquet")
    return [f"data.train_files={machine.folder}/*.parquet", "data.filter_overlong_prompts=true"]


def a_checkpoint_of_as_many_ranks(machine: Machine) -> list[str]:
    parts = ("model", "optim", "extra_state")
    return _checkpoint(machine, *(f"actor/{part}_world_size_2_rank_{rank}.pt" for part in parts for rank in range(2)))


def a_checkpoint_of_a_model_alone(machine: Machine) -> list[str]:
    loaded = "actor_rollout_ref.actor.checkpoint.load_contents=[model]"
    return [loaded, *_checkpoint(machine, "actor/model_world_size_2_rank_0.pt")]


def folders_that_nobody_reads(machine: Machine) -> list[str]:
    machine.patch.setenv("VERL_FILE_LOGGER_PATH", f"{machine.folder}/metrics.jsonl")
    machine.patch.setenv("TENSORBOARD_DIR", machine.file("board"))
    unread = ["trainer.default_local_dir=null", "trainer.resume_mode=disable", "trainer.save_freq=-1"]
    return [*unread, "trainer.logger=[console,file]", "trainer.project_name=null"]


def validation_files_that_are_never_used(machine: Machine) -> list[str]:
    prompts(16, prompt=[[{"role": "user", "content": None}]] * 16).to_parquet(machine.folder / "val.parquet")
    return [f"data.val_files={machine.folder}/val.parquet", "trainer.val_before_train=false", "trainer.test_freq=-1"]


def nulls_that_do_no_harm(machine: Machine) -> list[str]:
    messages = [{"role": "assistant", "content": None}, {"role": "user", "content": "1+1"}]
    truths = [{"style": "rule", "ground_truth": "2"}] * 1999 + [{"style": None, "ground_truth": None}]
    path = machine.file("rewards.py", "def compute_score(**kwargs):\n    return 1.0\n")
    columns = {"data_source": [*["sums"] * 1999, None], "level": [1.0, *[None] * 1999]}
    data = machine.data(prompts(2000, prompt=[MESSAGES] * 1999 + [messages], reward_model=truths, **columns))
    return [*data, f"reward.custom_reward_function.path={path}"]


def null_prompts_that_are_left_out(machine: Machine) -> list[str]:
    data = machine.data(prompts(2000, prompt=[MESSAGES] * 1999 + [None]))
    return [*data, "data.filter_overlong_prompts=true"]


LEGAL: list[Kind] = [
    nulls_that_do_no_harm,
    null_prompts_that_are_left_out,
    other_columns_in_each_file,
    lines_of_json,
    one_array_of_json,
    lines_that_name_their_loop,
    another_loop_for_files_that_are_never_used,
    many_files,
    a_checkpoint_of_as_many_ranks,
    a_checkpoint_of_a_model_alone,
    folders_that_nobody_reads,
    validation_files_that_are_never_used,
]


@pytest.mark.parametrize("kind", LEGAL, ids=lambda kind: kind.__name__)
def test_a_legal_job_of_a_rare_kind_is_not_called_wrong(kind, composed, machine):
    assert_tried_and_well(contents_of(composed, kind(machine)))


SECOND_FILES = {
    "the same columns": {"level": [2] * 8},
    "null": {"level": [None] * 8},
    "one column more": {"level": [2] * 8, "topic": ["sums"] * 8},
    "one column less": {},
    "another type": {"level": ["hard"] * 8},
}


@pytest.mark.parametrize("by_pattern", [False, True])
@pytest.mark.parametrize("columns", SECOND_FILES.values(), ids=SECOND_FILES)
def test_files_go_together_if_verls_data_set_can_read_them(columns, by_pattern, composed, machine):
    overrides = _two_files(machine, **columns)[by_pattern]
    data = with_settings(composed, [*overrides, "data.filter_overlong_prompts=false"]).data
    machine.patch.setattr("datasets.config.HF_DATASETS_CACHE", machine.folder / "cache")
    try:
        can_read = len(create_rl_dataset(data.train_files, data, None, None)) == 16
    except Exception:  # of the library `datasets`
        can_read = False
    told = [each.told for each in contents_of(composed, overrides) if each.verdict == "wrong"]
    assert bool(told) != can_read
    assert all("cannot read them together" in each for each in told)


def null_prompts_that_may_not_be_met(machine: Machine) -> list[str]:
    data = machine.data(prompts(2000, prompt=[MESSAGES] * 1999 + [None]))
    return [*data, "trainer.total_training_steps=1", f"data.val_files={machine.folder}/data.parquet", *NO_VALIDATION]


def truths_that_some_lack(machine: Machine) -> list[str]:
    truth = {"style": "rule", "ground_truth": "2"}
    return [*machine.data(prompts(2000, reward_model=[truth] * 1998 + [None] * 2)), *NO_VALIDATION]


UNLIKELY: dict[Kind, str] = {
    null_prompts_that_may_not_be_met: "1 of 2000 prompts are null: where verl's data set comes to one, it ends",
    truths_that_some_lack: "2 of 2000 rows have no reward_model, which verl's reward managers read of each",
}
"""What a job may get through its first step with -> part of what is said."""


@pytest.mark.parametrize("kind", UNLIKELY, ids=lambda kind: kind.__name__)
def test_what_only_some_step_may_meet_is_a_warning(kind, composed, machine):
    (found,) = matters(contents_of(composed, kind(machine)))
    assert (found.verdict, found.subject) == ("warning", "data.train_files")
    assert UNLIKELY[kind] in found.told


def files_that_are_elsewhere(machine: Machine) -> list[str]:
    return ["data.train_files=hdfs://data/train.parquet", *machine.loop(LOOP + SCORED)]


def a_large_array_of_json(machine: Machine) -> list[str]:
    text = prompts(1000, notes=["1" * 17_000] * 1000).to_json(orient="records")
    assert len(text) > MOST_BYTES
    return [f"data.train_files={machine.file('train.json', text)}"]


def a_large_file_of_other_types_than_a_small_one(machine: Machine) -> list[str]:
    for name, levels in (("a", ["easy"] * 16), ("b", [{"of": "1" * 17_000}] * 1000)):
        lines = prompts(len(levels), level=levels).to_json(orient="records", lines=True)
        machine.file(f"{name}.jsonl", lines)
    return [_each_by_its_name(machine, "jsonl")]


UNKNOWN: list[Kind] = [files_that_are_elsewhere, a_large_array_of_json, a_large_file_of_other_types_than_a_small_one]


@pytest.mark.parametrize("kind", UNKNOWN, ids=lambda kind: kind.__name__)
def test_what_cannot_be_known_is_not_called_wrong(kind, composed, machine):
    found = contents_of(composed, kind(machine))
    assert {finding.verdict for finding in found} == {"ok", "not looked at"}, found


@pytest.mark.usefixtures("composed_once")
def test_a_latest_checkpoint_that_is_not_there_is_warned_of_since_verl_begins_anew(job, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    overrides = [*job, FLAG, f"trainer.default_local_dir={tmp_path}"]
    (warned,) = [each for each in findings_of(*overrides) if each.verdict == "warning"]
    assert warned.subject == "trainer.default_local_dir"
    assert "names step 7, but there is no global_step_7, so the job begins anew" in warned.told
    (tmp_path / "global_step_7" / "actor").mkdir(parents=True)
    assert {each.verdict for each in findings_of(*overrides)} == {"ok"}


@pytest.mark.parametrize(
    ("overrides", "sections", "told"),
    [
        ([], ["actor_rollout_ref.actor"], "does not note the latest checkpoint"),
        (ON_MEGATRON, ["actor_rollout_ref.actor", "critic"], "never has Megatron-Core finish what it writes"),
        ([*ON_MEGATRON, "critic.enable=false"], ["actor_rollout_ref.actor"], "never has Megatron-Core finish"),
        (["trainer.save_freq=-1"], [], ""),
    ],
)
def test_checkpoints_that_verl_does_not_finish_are_warned_of(overrides, sections, told, composed):
    saves = [f"{section}.checkpoint.async_save=true" for section in ("actor_rollout_ref.actor", "critic")]
    found = folders_of_job(with_settings(composed, ["trainer.save_freq=5", "critic.enable=true", *saves, *overrides]))
    warned = {finding.subject: finding.told for finding in found if finding.verdict != "ok"}
    assert list(warned) == [f"{section}.checkpoint.async_save" for section in sections]
    assert all(told in each for each in warned.values())


def test_a_damaged_page_is_told_with_its_file(composed, tmp_path):
    file = tmp_path / "data.parquet"
    prompts(16).to_parquet(file)
    damaged = bytearray(file.read_bytes())
    damaged[4:200] = bytes(196)
    file.write_bytes(damaged)
    found = contents_of(composed, [f"data.train_files={file}"])
    (told,) = [each for each in found if each.verdict != "ok"]
    assert (told.subject, told.verdict, told.details) == ("data.train_files", "wrong", "")
    assert f"{file}: cannot be read (" in told.told


def test_a_full_disk_is_no_fault_of_the_files(composed, monkeypatch):
    def full(*_given, **_named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    (told,) = [each for each in contents_of(composed, []) if each.verdict != "ok"]
    assert told.verdict == "not looked at"
    assert "No space left on device" in told.told


def test_datasets_is_left_as_it_was_and_asks_no_hub(composed, monkeypatch):
    import datasets.config

    before, counts = vars(datasets.config).copy(), []
    real = datasets.load_dataset
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda *given, **named: counts.append(datasets.config.HF_UPDATE_DOWNLOAD_COUNTS) or real(*given, **named),
    )
    contents_of(composed, [])
    assert counts
    assert not any(counts)
    assert vars(datasets.config) == before


def test_paths_that_are_not_found_from_hydras_folder_are_told(composed, machine, monkeypatch):
    monkeypatch.chdir(machine.folder)
    machine.data(prompts(16))
    config = with_settings(composed, ["data.train_files=[data.parquet]", "data.val_files=gone.parquet"])
    goes = JobArguments(overrides=("hydra.job.chdir=False", "hydra.job.chdir=True"))
    (told,) = paths_from_hydras_folder(goes, config)
    assert (told.subject, told.verdict) == ("data.train_files", "wrong")
    assert f"Write the whole path ({machine.folder}/data.parquet)" in told.told
    assert not list(paths_from_hydras_folder(JobArguments(), config))
    assert not list(paths_from_hydras_folder(goes, composed)), "its paths are whole ones"


def test_folders_behind_a_link_to_nothing_are_told(composed, machine, monkeypatch):
    link = machine.folder / "disk"
    link.symlink_to(machine.folder / "not mounted")
    overrides = [f"trainer.default_local_dir={link}/checkpoints", f"trainer.rollout_data_dir={link}/rollouts"]
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", f"{link}/metrics.jsonl")
    found = list(folders_of_job(with_settings(composed, [*overrides, "trainer.logger=[file]"])))
    told = {each.subject: each.told for each in found if each.verdict == "wrong"}
    assert sorted(told) == ["VERL_FILE_LOGGER_PATH", "trainer.default_local_dir", "trainer.rollout_data_dir"]
    for each in told.values():
        assert f"{link} is a link to {machine.folder / 'not mounted'}, which is not there" in each


def test_a_folder_that_hydra_cannot_make_is_told(machine):
    name = f"{machine.file('taken')}/run"
    (told,) = folder_of_hydra(JobArguments(overrides=("hydra.run.dir=gone", f"hydra.run.dir={name}")))
    assert (told.subject, told.verdict) == ("hydra.run.dir", "wrong")
    assert not list(folder_of_hydra(JobArguments(overrides=(f"hydra.run.dir={name}", "hydra.run.dir=here"))))


def test_a_folder_that_cannot_be_read_stops_no_look(composed, monkeypatch):
    def refuses(config) -> list[Finding]:
        raise PermissionError("Permission denied")

    monkeypatch.setattr("verl_padding.doctor.folders._disk", refuses)
    (matter,) = matters(folders_of_job(composed))
    assert (matter.verdict, "Permission denied" in matter.told) == ("not looked at", True)
