"""``verl-padding doctor`` takes the first prompts as far as a job goes before it trains."""

import asyncio
from types import SimpleNamespace

import pytest
from tokenizers import normalizers

from tests.support.jobs_for_doctor import (
    LOOP,
    MESSAGES,
    MODEL,
    SCORED,
    Kind,
    Machine,
    Reasons,
    assert_told,
    assert_tried_and_well,
    contents_of,
    matters,
    prompts,
)
from verl_padding.doctor.agent_loops import loops_of_job
from verl_padding.doctor.chat_templates import template_of_job
from verl_padding.doctor.finding import panics_as_errors
from verl_padding.doctor.loaded_model import LoadedModel
from verl_padding.local.tiny_models import make_byte_tokenizer, make_tiny_model

pytestmark = pytest.mark.usefixtures("no_ray_cluster")

BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def a_tokenizer_that_panics(machine: Machine) -> list[str]:
    """In Rust, at a letter that is not of ASCII: its map of characters ends before that."""
    tokenizer, n_ascii = make_byte_tokenizer([]), 128
    size = 4 * n_ascii
    tokenizer.backend_tokenizer.normalizer = normalizers.Precompiled(size.to_bytes(4, "little") + bytes(size) + b"ab\0")
    tokenizer.save_pretrained(machine.folder / "tokenizer")
    data = machine.data(prompts(16, prompt=[[{"role": "user", "content": "1+1 = \u00e9"}]] * 16))
    return [*data, f"actor_rollout_ref.model.tokenizer_path={machine.folder / 'tokenizer'}"]


def a_filter_in_which_the_tokenizer_panics(machine: Machine) -> list[str]:
    return [*a_tokenizer_that_panics(machine), "data.filter_overlong_prompts=true"]


def a_template_that_is_cut_off(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.model.custom_chat_template='{% for m in messages %}{{ m.content }'"]


def a_tokenizer_without_template(machine: Machine) -> list[str]:
    folder = machine.model()
    (folder / "chat_template.jinja").unlink()
    return [f"{MODEL}={folder}"]


def a_filter_that_wants_a_template(machine: Machine) -> list[str]:
    return [*a_tokenizer_without_template(machine), *machine.loop(LOOP + SCORED), "data.filter_overlong_prompts=true"]


def tokens_that_the_model_lacks(machine: Machine) -> list[str]:
    make_byte_tokenizer(["<|more|>"]).save_pretrained(machine.folder / "tokenizer")
    data = prompts(16, prompt=[[{"role": "user", "content": "1+1<|more|>"}]] * 16)
    return [*machine.data(data), f"actor_rollout_ref.model.tokenizer_path={machine.folder / 'tokenizer'}"]


def a_template_that_refuses_the_prompts(machine: Machine) -> list[str]:
    template = "{{ raise_exception('System role not supported') }}"
    return [f'actor_rollout_ref.model.custom_chat_template="{template}"']


def messages_without_content(machine: Machine) -> list[str]:
    return machine.data(prompts(16, prompt=[[{"role": "user", "content": None, "name": "x"}]] * 16))


def images_that_nobody_looks_at(machine: Machine) -> list[str]:
    return machine.data(prompts(16, images=[["cat.png"]] * 16))


def a_filter_that_leaves_nothing(machine: Machine) -> list[str]:
    return ["data.filter_overlong_prompts=true", "data.max_prompt_length=3"]


def a_filter_that_leaves_less_than_a_batch(machine: Machine) -> list[str]:
    data = prompts(16, prompt=[MESSAGES] * 7 + [[{"role": "user", "content": "1+" * 99}]] * 9)
    return [*machine.data(data), "data.filter_overlong_prompts=true", "data.max_prompt_length=50"]


def a_column_with_a_name_of_verls(machine: Machine) -> list[str]:
    return machine.data(prompts(16, responses=["2"] * 16))


def a_column_that_verl_knows_a_validation_by(machine: Machine) -> list[str]:
    return machine.data(prompts(16, validate=[False] * 16))


def a_token_budget_below_the_prompts(machine: Machine) -> list[str]:
    return [f"{BUDGET}=8"]


def a_source_that_nobody_scores(machine: Machine) -> list[str]:
    """A loop of several outputs, all made in its own file."""
    body = """\
        outputs = []
        for _ in range(2):
            outputs.append(self.made())
        return outputs

    def made(self):
        return AgentLoopOutput(
            prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=2, metrics={},
            extra_fields={"min_global_steps": 1, "max_global_steps": 1},
        )
"""
    return [*machine.data(prompts(16, data_source=["sums"] * 16)), *machine.loop(LOOP + body)]


def a_loop_that_wants_a_template(machine: Machine) -> list[str]:
    return [
        *a_tokenizer_without_template(machine),
        *machine.loop(LOOP + "        self.tokenizer.apply_chat_template(kwargs['raw_prompt'])\n"),
    ]


def a_template_of_tokens_that_the_model_lacks(machine: Machine) -> list[str]:
    make_byte_tokenizer(["<|more|>"]).save_pretrained(machine.folder / "tokenizer")
    return [
        f"actor_rollout_ref.model.tokenizer_path={machine.folder / 'tokenizer'}",
        "actor_rollout_ref.model.custom_chat_template='<|more|>{{ messages[0].content }}'",
    ]


CANNOT_START: Reasons = {
    a_source_that_nobody_scores: ("data.train_files", "its data_source is sums, and verl has no score for that. Set"),
    a_token_budget_below_the_prompts: (BUDGET, "train.parquet have 22 tokens or more, without a response. A row that"),
    a_template_that_is_cut_off: ("actor_rollout_ref.model.custom_chat_template", "no template of Jinja ("),
    a_tokenizer_without_template: (
        "actor_rollout_ref.model.custom_chat_template",
        "the agent loop 'single_turn_agent' puts prompts through a chat template, and the model's tokenizer has none",
    ),
    a_filter_that_wants_a_template: (
        "actor_rollout_ref.model.custom_chat_template",
        "null: data.filter_overlong_prompts=true puts",
    ),
    a_template_of_tokens_that_the_model_lacks: (MODEL, "its tokenizer makes token 259 of a prompt, and the model has"),
    tokens_that_the_model_lacks: (MODEL, "its tokenizer makes token 259 of a prompt, and the model has 259"),
    a_template_that_refuses_the_prompts: (
        "data.train_files",
        "cannot be put through the chat template (TemplateError: System role",
    ),
    images_that_nobody_looks_at: (
        "data.train_files",
        "prompt 0 has something in its column 'images', and the model reads text alone",
    ),
    messages_without_content: (
        "data.train_files",
        "16 of the first 16 prompts cannot be put through the chat template",
    ),
    a_filter_that_leaves_nothing: ("data.filter_overlong_prompts", "true: leaves 0 of 16 prompts of data.train_files"),
    a_filter_that_leaves_less_than_a_batch: ("data.filter_overlong_prompts", "true: leaves 7 of 16 prompts"),
    a_column_that_verl_knows_a_validation_by: (
        "data.train_files",
        "has a column 'validate', by which verl's agent loop workers know prompts of a validation",
    ),
    a_filter_in_which_the_tokenizer_panics: (
        "data.filter_overlong_prompts",
        "true: verl's filter ends with the job at the prompts of data.train_files (PanicError: index out of bounds",
    ),
    a_tokenizer_that_panics: (
        "data.train_files",
        "16 of the first 16 prompts cannot be put through the chat template (PanicError: index out of bounds",
    ),
    a_column_with_a_name_of_verls: ("data.train_files", "has a column 'responses', a name that verl's agent loop"),
}
"""Why a job cannot start, or cannot end its first step -> the setting that is told, and part of what is."""


@pytest.mark.parametrize("reason", CANNOT_START, ids=lambda reason: reason.__name__)
def test_a_job_that_cannot_start_here_is_told_with_the_setting_that_is_why(reason, composed, machine):
    assert_told(contents_of(composed, reason(machine)), *CANNOT_START[reason])


def a_column_of_validation_among_those_of_validation(machine: Machine) -> list[str]:
    prompts(16, validate=[True] * 16).to_parquet(machine.folder / "val.parquet")
    return [f"data.val_files={machine.folder}/val.parquet"]


def no_template_where_the_loop_brings_one(machine: Machine) -> list[str]:
    text = "        self.tokenizer.apply_chat_template(kwargs['raw_prompt'], chat_template=MINE)\n"
    return [*a_tokenizer_without_template(machine), *machine.loop(LOOP + text + SCORED)]


def no_template_where_the_loop_looks_for_one(machine: Machine) -> list[str]:
    text = "        has = getattr(self.tokenizer, 'chat_template', None)\n"
    text += "        ids = self.tokenizer.apply_chat_template(kwargs['raw_prompt']) if has else [1]\n"
    return [*a_tokenizer_without_template(machine), *machine.loop(LOOP + text + SCORED)]


def no_template_where_another_class_applies_one(machine: Machine) -> list[str]:
    other = "\nclass Judge:\n    def ask(self):\n        return self.tokenizer.apply_chat_template([])\n"
    judge = "        self.judge_tokenizer.apply_chat_template(kwargs['raw_prompt'])\n"
    return [*a_tokenizer_without_template(machine), *machine.loop(LOOP + judge + SCORED + other)]


def no_template_where_the_job_brings_one(machine: Machine) -> list[str]:
    template = "{{ messages[0].content }}"
    return [*a_tokenizer_without_template(machine), f'actor_rollout_ref.model.custom_chat_template="{template}"']


def a_filter_that_leaves_enough(machine: Machine) -> list[str]:
    data = prompts(16, prompt=[MESSAGES] * 9 + [[{"role": "user", "content": "1+" * 99}]] * 7)
    val = f"data.val_files={machine.folder}/data.parquet"
    return [*machine.data(data), val, "data.filter_overlong_prompts=true", "data.max_prompt_length=50"]


def a_filter_that_leaves_out_what_the_template_refuses(machine: Machine) -> list[str]:
    data = prompts(16, prompt=[MESSAGES] * 9 + [[{"role": "user", "content": None}]] * 7)
    val = f"data.val_files={machine.folder}/data.parquet"
    return [*machine.data(data), val, "data.filter_overlong_prompts=true"]


def settings_of_verls_examples(machine: Machine) -> list[str]:
    """Those of its scripts in examples/ that are about models, data and rewards."""
    val = "actor_rollout_ref.rollout.val_kwargs"
    return [
        "data.filter_overlong_prompts=true",
        "data.truncation=error",
        "data.shuffle=false",
        "data.return_raw_chat=true",
        "actor_rollout_ref.model.trust_remote_code=true",
        "actor_rollout_ref.model.use_shm=true",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora.merge=true",
        "actor_rollout_ref.model.target_modules=all-linear",
        "actor_rollout_ref.rollout.top_k=-1",
        f"{val}.do_sample=true",
        f"{val}.temperature=1.0",
        f"{val}.top_p=0.7",
        "reward.reward_manager.name=dapo",
        "trainer.total_epochs=15",
    ]


LEGAL: list[Kind] = [
    a_column_of_validation_among_those_of_validation,
    no_template_where_the_loop_brings_one,
    no_template_where_the_loop_looks_for_one,
    no_template_where_another_class_applies_one,
    no_template_where_the_job_brings_one,
    a_filter_that_leaves_enough,
    a_filter_that_leaves_out_what_the_template_refuses,
    settings_of_verls_examples,
]


@pytest.mark.parametrize("kind", LEGAL, ids=lambda kind: kind.__name__)
def test_a_legal_job_of_a_rare_kind_is_not_called_wrong(kind, composed, machine):
    assert_tried_and_well(contents_of(composed, kind(machine)))


def test_a_loop_that_seems_to_want_a_template_is_warned_of(composed, machine):
    found = contents_of(composed, a_loop_that_wants_a_template(machine))
    (warned,) = [each for each in found if each.verdict != "ok"]
    assert (warned.subject, warned.verdict) == ("actor_rollout_ref.model.custom_chat_template", "warning")
    assert "'mine' seems to put prompts through a chat template" in warned.told


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (
            "        from mine import one_output\n        return one_output()\n",
            "a session ends where its agent loop gives an output no reward_score",
        ),
        ("        return one_output(reward_score=1.0)\n", None),
    ],
)
def test_a_source_without_a_score_is_warned_of_where_a_loop_seems_to_leave_rewards_to_verl(
    made, told, composed, machine
):
    data = machine.data(prompts(16, data_source=["sums"] * 16))
    found = matters(contents_of(composed, [*data, *machine.loop(LOOP + made)]))
    if told is None:
        assert found == []
        return
    (warned,) = found
    assert (warned.verdict, warned.subject) == ("warning", "data.train_files")
    assert told in warned.told


def test_a_model_whose_prompts_verl_writes_itself_needs_no_template(composed):
    from verl.utils.tokenizer.deepseek import EOS_TOKEN

    for kind, told in (("deepseek_v4", []), ("qwen2", ["wrong"])):
        tokenizer = make_byte_tokenizer([EOS_TOKEN])
        tokenizer.chat_template = None
        typed = SimpleNamespace(tokenizer=tokenizer, processor=None, hf_config=SimpleNamespace(model_type=kind))
        found = template_of_job(composed, LoadedModel(typed), loops_of_job(composed))
        assert [each.verdict for each in found] == told


def test_one_prompt_that_fails_before_the_time_is_up_does_not_stand_for_all(composed, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_padding.doctor.chat_templates.SECONDS", 0)
    empty = [{"role": "user", "content": None}]
    prompts(16, prompt=[empty] + [MESSAGES] * 15).to_parquet(tmp_path / "data.parquet")
    found = contents_of(composed, [f"data.train_files={tmp_path}/data.parquet"])
    matter = {each.subject: each for each in found if each.verdict != "ok"}
    assert [each.verdict for each in matter.values()] == ["warning"], matter
    assert "1 of the first 1 prompt cannot be put" in matter["data.train_files"].told


def test_prompts_with_images_are_tried_and_nothing_is_fetched(composed, tmp_path_factory, tmp_path):
    pytest.importorskip("torchvision")
    from PIL import Image

    model = make_tiny_model("qwen3_vl", tmp_path_factory.mktemp("seeing"))
    Image.new("RGB", (32, 32)).save(tmp_path / "cat.png")
    asked = [[{"role": "user", "content": "<image>What is it?"}]] * 16

    def matter(image: str, *overrides: str) -> list[tuple[str, str, str]]:
        prompts(16, prompt=asked, images=[[image]] * 16).to_parquet(tmp_path / "data.parquet")
        found = contents_of(composed, [f"{MODEL}={model}", f"data.train_files={tmp_path}/data.parquet", *overrides])
        assert [each for each in found if each.subject == "model"], found
        return [(each.subject, each.verdict, each.told) for each in found if each.verdict != "ok"]

    there = str(tmp_path / "cat.png")
    assert matter(there) == []
    assert matter("http://127.0.0.1:9/cat.png") == []
    ((setting, verdict, told),) = matter("/nowhere/cat.png")
    assert (setting, verdict) == ("data.train_files", "warning")
    assert "an image cannot be read (FileNotFoundError" in told
    ((setting, verdict, told),) = matter(there, "data.filter_overlong_prompts=true")
    assert (setting, verdict) == ("data.filter_overlong_prompts", "not looked at")


def test_what_some_prompts_are_is_warned_of_and_the_job_can_start(composed, tmp_path):
    long, empty = [{"role": "user", "content": "1+" * 99}], [{"role": "user", "content": None}]
    prompts(16, prompt=[MESSAGES] * 10 + [long] * 4 + [empty] * 2).to_parquet(tmp_path / "data.parquet")
    found = contents_of(composed, [f"data.train_files={tmp_path}/data.parquet", "data.max_prompt_length=64"])
    warned = {each.subject: each.told for each in found if each.verdict == "warning"}
    assert "2 of the first 16 prompts cannot be put through the chat template" in warned["data.train_files"]
    assert "64: 4 of the first 16 prompts" in warned["data.max_prompt_length"]
    assert not [each for each in found if each.verdict == "wrong"], found


def test_prompts_are_tried_where_the_model_can_be_read(composed, machine):
    prompts(16).to_parquet(machine.folder / "data.parquet")
    found = contents_of(composed, [*machine.loop(LOOP + SCORED), f"data.train_files={machine.folder}/data.parquet"])
    assert [each.told for each in found if each.subject == "data.train_files" and "tried" in each.told]


def test_verl_takes_prompts_with_such_a_column_for_those_of_a_validation(composed):
    # If this fails, verl asks what the column holds, and the doctor need not tell it any more.
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.utils.dataset.rl_dataset import collate_fn
    from verl.utils.tensordict_utils import assign_non_tensor_data, get_tensordict

    class Worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
        def __init__(self):
            self.config, self.background_tasks, self.partitions = composed, set(), []

        async def _run_prompt(self, prompt, sampling_params, trajectory, trace=False):
            self.partitions.append("train" if not trajectory["validate"] else "val")

    async def partitions(**columns: object) -> list[str]:
        worker = Worker()
        batch = get_tensordict(collate_fn([{"raw_prompt": MESSAGES, "index": 0, **columns}] * 2))
        assign_non_tensor_data(batch, "global_steps", 1)
        await worker.generate_sequences(batch)
        await asyncio.gather(*worker.background_tasks)
        return worker.partitions

    assert asyncio.run(partitions()) == ["train", "train"]
    assert asyncio.run(partitions(validate=False)) == ["val", "val"]


def test_who_interrupts_the_doctor_while_prompts_are_tried_ends_it(composed, monkeypatch):
    def interrupted(*_given, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "verl_padding.doctor.chat_templates._builder",
        lambda *_: SimpleNamespace(build_initial_tokens=interrupted),
    )
    with pytest.raises(KeyboardInterrupt):
        contents_of(composed, [])
    with pytest.raises(SystemExit), panics_as_errors():
        raise SystemExit


def test_tokens_of_the_template_are_a_warning_where_a_loop_of_ones_own_seems_to_make_them(composed, machine):
    overrides = a_template_of_tokens_that_the_model_lacks(machine)
    calls = "        ids = await self.ct_build_initial_tokens(kwargs['raw_prompt'])\n"
    (found,) = matters(contents_of(composed, [*overrides, *machine.loop(LOOP + calls + SCORED)]))
    assert (found.verdict, found.subject) == ("warning", MODEL)
    assert "make token 259 of any message, and the model has 259 (vocab_size)" in found.told
    assert_tried_and_well(contents_of(composed, [*overrides, *machine.loop(LOOP + SCORED)]))
