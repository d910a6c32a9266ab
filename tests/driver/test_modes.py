"""A job has the mode that its user chose, wherever that stands, and verl finds what it looks up by the mode's name."""

import ast
import logging
from inspect import getsource
from pathlib import Path
from uuid import uuid4

import omegaconf
import pytest
import transfer_queue as tq
import verl
import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import OmegaConf
from omegaconf.errors import UnsupportedInterpolationType
from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, get_trainer_cls
from verl.utils.skip import SkipManager

from tests.support.rows_in_queue import PARTITION, put_rows, queue_content
from tests.support.verl_config import DYNAMIC, SEPARATE, compose_job
from verl_padding import __version__
from verl_padding.driver.mixin import PaddedTrainer
from verl_padding.entry import import_hooks
from verl_padding.job.modes import STOCK_MODES
from verl_padding.plan import STRATEGIES

NAMES = [*STOCK_MODES, *(f"padded_{mode}" for mode in STOCK_MODES)]
SEPARATED = "separate_async"
"""The mode whose section says how many local updates a step has: with another's a job is another."""


def as_the_task_runner(config):
    """The trainer that ``verl.trainer.main_ppo`` makes of a config, up to its first worker."""
    return get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)


def write(path: Path, content: dict, package: str | None = None) -> None:
    path.parent.mkdir(exist_ok=True)
    header = f"# @package {package}\n" if package else ""
    path.write_text(header + yaml.safe_dump(content, sort_keys=False))


def mode_section(name: str) -> dict:
    return {"trainer": {"v1": {"trainer_mode": name}}}


def the_command_line(folder, name):
    return "ppo_trainer", ["+padding=prompt", f"trainer.v1.trainer_mode={name}"]


def the_command_line_before_the_flag(folder, name):
    return "ppo_trainer", [f"trainer.v1.trainer_mode={name}", "+padding=prompt"]


def a_primary_config(folder, name):
    write(folder / "mine.yaml", {"defaults": ["ppo_trainer", "_self_"], **mode_section(name)})
    return "mine", ["+padding=prompt"]


def a_primary_config_that_has_the_flag(folder, name):
    write(folder / "mine.yaml", {"defaults": ["ppo_trainer", {"padding": "prompt"}, "_self_"], **mode_section(name)})
    return "mine", []


def a_primary_config_and_the_flag_after_it(folder, name):
    write(folder / "mine.yaml", {"defaults": ["ppo_trainer", "_self_", {"padding": "prompt"}], **mode_section(name)})
    return "mine", []


def a_primary_config_with_a_section_of_its_own(folder, name):
    own = {"padding": {"strategy": "prompt"}, **mode_section(name)}
    write(folder / "mine.yaml", {"defaults": ["ppo_trainer", "_self_"], **own})
    return "mine", []


def an_experiment_before_the_flag(folder, name):
    write(folder / "experiment" / "asynchronous.yaml", mode_section(name), package="_global_")
    return "ppo_trainer", ["+experiment=asynchronous", "+padding=prompt"]


def an_experiment_after_the_flag(folder, name):
    write(folder / "experiment" / "asynchronous.yaml", mode_section(name), package="_global_")
    return "ppo_trainer", ["+padding=prompt", "+experiment=asynchronous"]


def an_experiment_that_has_the_flag(folder, name):
    own = {"defaults": [{"/padding": "prompt"}], **mode_section(name)}
    write(folder / "experiment" / "asynchronous.yaml", own, package="_global_")
    return "ppo_trainer", ["+experiment=asynchronous"]


PLACES = [
    the_command_line,
    the_command_line_before_the_flag,
    a_primary_config,
    a_primary_config_that_has_the_flag,
    a_primary_config_and_the_flag_after_it,
    a_primary_config_with_a_section_of_its_own,
    an_experiment_before_the_flag,
    an_experiment_after_the_flag,
    an_experiment_that_has_the_flag,
]


@pytest.mark.parametrize(
    ("place", "name"),
    [(place, SEPARATED) for place in PLACES] + [(the_command_line, name) for name in NAMES if name != SEPARATED],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_trainer_is_the_padded_one_of_the_mode_wherever_that_stands(place, name, tmp_path):
    primary, overrides = place(tmp_path, name)
    # verl's configs beside the user's own, whichever of the two the primary one is among.
    search = f"hydra.searchpath=[pkg://verl.trainer.config,file://{tmp_path}]"
    where = initialize_config_dir(str(tmp_path), version_base=None) if primary == "mine" else verls()
    with where:
        config = compose(primary, overrides=[search, *overrides, *DYNAMIC, *SEPARATE])
    mode = name.removeprefix("padded_")
    trainer = as_the_task_runner(config)
    assert type(trainer) is get_trainer_cls(f"padded_{mode}")
    assert trainer._padding.strategy == "prompt"
    assert trainer.parameter_sync_step == (4 if mode == "separate_async" else 1)
    assert trainer._job_reader.step_job(dp_sizes=ONE_EACH, updates_actor=True, seed=0).prompts == (
        16 if mode == "separate_async" else 64
    )
    assert trainer.config.trainer.v1.trainer_mode == mode


def verls():
    return initialize_config_module("verl.trainer.config", version_base=None)


ONE_EACH = dict.fromkeys(("actor", "log_prob", "ref", "critic", "values"), 1)


def test_a_job_of_the_groups_stops_in_a_process_without_the_plugin():
    # Where the trainer is made, that is: on whichever node Ray puts it. verl resolves the config there first of all.
    for group in STRATEGIES:
        config = compose_job(f"+padding={group}")
        assert config.padding.version == __version__
        sent = OmegaConf.create(OmegaConf.to_yaml(config))
        OmegaConf.clear_resolver("verl_padding.version")
        try:
            with pytest.raises(UnsupportedInterpolationType, match=r"interpolation type verl_padding\.version"):
                OmegaConf.resolve(sent)
        finally:
            import_hooks._register_resolver(omegaconf)


# ---------------------------------------------------------------- what verl reads by the name

READS = {
    ("trainer/main_ppo.py", "run"): 1,  # chooses the trainer, whose constructor puts verl's own name in its place
    ("trainer/ppo/v1/replay_buffer.py", "__init__"): 2,  # is told by the trainer, and keeps it
    ("trainer/ppo/v1/trainer_base.py", "__init__"): 3,  # reads it, and the section of its name
    ("trainer/ppo/v1/trainer_base.py", "_build_replay_buffer"): 3,
    ("trainer/ppo/v1/trainer_base.py", "_init_dataloader"): 1,
    ("trainer/ppo/v1/trainer_base.py", "_load_checkpoint"): 1,
    ("trainer/ppo/v1/trainer_base.py", "_reissue_inflight_prompts"): 1,
    ("trainer/ppo/v1/trainer_base.py", "_save_checkpoint"): 1,
    ("trainer/ppo/v1/trainer_base.py", "_submit_batch_to_rollout"): 1,
    ("utils/skip/rollout_skip.py", "__init__"): 1,  # the section of its name, of the trainer's config
}
"""Where verl 0.9.1 reads the name of the mode, by file and function, and how often. Each read but the first finds
verl's own name, since it comes after the trainer's constructor; a new one is to be looked at, whether that holds."""


def reads_of_the_mode() -> dict[tuple[str, str], int]:
    root = Path(verl.__file__).parent
    found: dict[tuple[str, str], int] = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        if "trainer_mode" in text:
            _look_for_reads(ast.parse(text), path.relative_to(root).as_posix(), "module", found)
    return found


def _look_for_reads(node: ast.AST, file: str, function: str, found: dict[tuple[str, str], int]) -> None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    named = {
        ast.Attribute: lambda: node.attr == "trainer_mode",
        ast.Name: lambda: node.id == "trainer_mode",
        ast.Constant: lambda: isinstance(node.value, str) and "trainer_mode" in node.value and " " not in node.value,
    }
    if named.get(type(node), lambda: False)():
        found[file, function] = found.get((file, function), 0) + 1
    for child in ast.iter_child_nodes(node):
        _look_for_reads(child, file, function, found)


def test_every_place_where_verl_reads_the_name_of_the_mode_is_known():
    assert reads_of_the_mode() == READS


def test_a_line_of_verls_log_that_python_refuses_is_not_written_where_no_replica_shares_the_trainers_devices(
    monkeypatch,
):
    log = logging.getLogger(PPOTrainerSeparateAsync.__module__)
    assert "flush=True" in getsource(PPOTrainerSeparateAsync._setup), (
        "verl has mended it: PaddedTrainerSeparateAsync._setup and the doctor's line can go"
    )
    monkeypatch.setattr(log, "level", log.level)  # given back at the end
    log.setLevel(logging.INFO)
    config = compose_job(*DYNAMIC, *SEPARATE, "+padding=prompt", "trainer.v1.trainer_mode=separate_async")
    config.actor_rollout_ref.hybrid_engine = False
    trainer = as_the_task_runner(config)
    monkeypatch.setattr(PaddedTrainer, "_setup", lambda self: log.info("one line", flush=True))
    trainer._setup()
    assert log.level == logging.WARNING


@pytest.mark.ray
@pytest.mark.usefixtures("transfer_queue")
@pytest.mark.parametrize("name", ["separate_async", "padded_separate_async"])
def test_rows_of_every_local_update_are_saved_and_replayed_where_rollouts_are_skipped(name, tmp_path, monkeypatch):
    skip = [
        "skip.rollout_tq.enable=true",
        f"skip.rollout_tq.dump_dir={tmp_path}",
        "skip.rollout_tq.steps=[1]",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=1",
    ]
    config = compose_job(*DYNAMIC, *SEPARATE, "+padding=prompt", f"trainer.v1.trainer_mode={name}", *skip)
    trainer = as_the_task_runner(config)
    assert isinstance(trainer, PaddedTrainer)
    trainer.replay_buffer.poll_interval = 0.01

    def sampled_prompts() -> list[int]:
        """The lengths of the prompts, by which they are known, that the step's local updates are given."""
        lengths = []
        for _ in range(trainer.parameter_sync_step):
            batch, _ = trainer.replay_buffer.sample(global_steps=1, partition_id=PARTITION, batch_size=2)
            lengths += [tag["prompt_len"] for tag in batch.tags]
            rows = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["prompts"])
            assert [len(prompt) for prompt in rows["prompts"]] == lengths[-2:]
        return sorted(lengths)

    monkeypatch.setattr(SkipManager, "skip_instances", {})
    monkeypatch.setattr(SkipManager, "step", -1)
    try:
        SkipManager.init(trainer.config)
        SkipManager.set_step(1)
        uids = [uuid4().hex for _ in range(8)]
        put_rows([(length, 2) for length in range(3, 11)], [f"{uid}_0_0" for uid in uids])
        tq.kv_batch_put(keys=uids, partition_id=PARTITION, tags=[FINISHED] * 8)
        assert sampled_prompts() == list(range(3, 11))
        assert len(list(tmp_path.rglob("tq_batch.pt"))) == 4

        tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)
        monkeypatch.setattr(trainer, "_next_train_batch", lambda: {"uid": [uuid4().hex for _ in range(8)]})
        trainer._add_batch_to_generate()  # without a rollout: nothing could be submitted to one here
        assert sampled_prompts() == list(range(3, 11))
    finally:
        tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)


FINISHED = {"is_prompt": True, "status": "finished", "global_steps": 1}


def test_the_reads_are_found_in_all_their_forms():
    # Known to be able to fail: a read by attribute, by key and by a path of text.
    reads = ["c.trainer_mode", "c['trainer_mode']", "select(c, 'trainer.v1.trainer_mode')", "trainer_mode"]
    code = "def f(c):\n    " + "\n    ".join(reads)
    found: dict[tuple[str, str], int] = {}
    _look_for_reads(ast.parse(code), "file", "module", found)
    assert found == {("file", "f"): 4}
