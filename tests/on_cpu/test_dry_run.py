"""A dry run: a real step of a job on this machine's CPU, its model shrunk."""

import json
import shutil

import pytest

from tests.support.own_jobs import dry_run_of
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.on_cpu.dry_run import (
    MAX_LINES,
    DryRunError,
    excerpt,
    metrics_not_finite,
    run_step,
)
from verl_padding.on_cpu.tiny_models import make_tiny_model

STEP = "verl_padding.on_cpu.dry_run"


def test_a_job_that_ends_well_without_a_step_is_wrong(own, tmp_path, monkeypatch):
    def end(config, folder, *_):
        (folder / "log").write_text("")
        return 0

    monkeypatch.setattr(f"{STEP}.write_shrunk_model", lambda *_: ("a model", "sdpa"))
    monkeypatch.setattr(f"{STEP}._run_job", end)
    config = compose_job(JobArguments(overrides=tuple(own.overrides())))
    with pytest.raises(DryRunError, match="without a step"):
        run_step(config, folder=tmp_path, timeout_s=1)


def test_an_excerpt_has_the_first_traceback_and_the_end():
    log = ["start"] * 100 + ["Traceback (most recent call last):", "  mine"] + ["more"] * 500
    shown = excerpt("\n".join([*log, "KeyError: 'end'"])).splitlines()
    assert len(shown) == 2 * MAX_LINES
    assert (shown[0], shown[-1]) == ("Traceback (most recent call last):", "KeyError: 'end'")
    assert excerpt("a\nb") == "a\nb"
    assert excerpt("a\nTraceback (most recent call last):\nb").startswith("Traceback")


def test_a_job_that_is_refused_before_ray_starts_is_shown_by_its_reason(own):
    code, said = dry_run_of(*own.overrides(*own.reward(), "padding.packer=no_such_packer"))
    assert code == 1
    assert "no_such_packer" in said.splitlines()[-1]


def test_a_job_without_the_name_of_a_rollout_is_refused_in_a_line(own):
    job = [each for each in own.overrides() if each != "+local=cpu"]
    sizes = ("actor.ppo", "rollout.log_prob")
    one = [f"actor_rollout_ref.{each}_micro_batch_size_per_gpu=1" for each in sizes]
    code, said = dry_run_of(*job, *one)
    assert code == 1
    assert "actor_rollout_ref.rollout.name" in said.splitlines()[-1]


def test_a_model_without_architectures_is_named_with_its_path(own, tmp_path):
    folder = shutil.copytree(own.model, tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    code, said = dry_run_of(*own.overrides(f"actor_rollout_ref.model.path={folder}"))
    assert code == 1
    assert f"actor_rollout_ref.model.path={folder}: " in said
    assert "architectures" in said


def test_a_loss_that_is_no_number_is_wrong_and_a_correlation_is_not():
    unknown = float("nan")
    step = {"training/rollout_actor_probs_pearson_corr": unknown, "actor/pg_loss": unknown}
    assert metrics_not_finite([step]) == ["actor/pg_loss"]


CRITIC = ("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=4", "critic.enable=true")
JOBS = {
    "gae": CRITIC,
    "stock verl": ("~padding",),
    "tools": (),
    "separate_async": (
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ),
    "qwen3_vl": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_step_goes_well_and_leaves_the_users_folder_as_it_was(job, own, tmp_path_factory):
    if job.startswith("qwen3"):
        own.model = make_tiny_model(job, tmp_path_factory.mktemp("models"))
    loop = {"qwen3_vl": [], "tools": own.tool()}.get(job, own.loop())
    overrides = own.overrides(*loop, *own.reward(), *JOBS[job])
    before = {file.name: file.read_bytes() for file in own.folder.iterdir() if file.is_file()}
    code, said = dry_run_of(*overrides)
    assert code == 0, said
    assert "1 step(s)" in said
    assert "rows of 8 sessions" in said
    assert {
        file.name: file.read_bytes() for file in own.folder.iterdir() if file.is_file()
    } == before
    assert {each.name for each in own.folder.iterdir() if each.is_dir()} <= {"__pycache__"}


OWN_CODE = """
import verl_padding.on_cpu  # before verl, as its own import of torchvision wants it
from verl.trainer.ppo.core_algos import register_policy_loss

@register_policy_loss("mine")
def loss(old_log_prob, log_prob, advantages, response_mask, **kwargs):
    return (log_prob * response_mask).sum() * float("nan"), {}
"""
FAILING = {
    "a loss that is no number": (
        "return 1.0",
        ["actor_rollout_ref.actor.policy_loss.loss_mode=mine"],
        ["not finite"],
    ),
    "a reward that raises in one session of a prompt": (
        (
            "import random; extra_info = given['extra_info']\n"
            "    return {'score': 1.0 if random.random() < 0.5 else extra_info['answer']}"
        ),
        [],
        ["failed, and verl went on without", "KeyError: 'answer'", 'reward_of_mine.py", line 3'],
    ),
    "a step that takes too long": ("import time; time.sleep(999)", [], ["--timeout=60"]),
    "a reward that is not returned on each way": (
        "import random\n    if random.random() < 0.5:\n        return 1.0",
        [],
        ["reward.custom_reward_function.name=compute_score", "reward_of_mine.py", "None"],
    ),
}
"""The reward function's code, overrides, and words of what is said."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING)
def test_a_step_that_fails_is_shown_with_what_is_wrong(name, own, monkeypatch):
    code, overrides, words = FAILING[name]
    own.file("code_of_mine.py", OWN_CODE)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "code_of_mine")
    reward = own.reward(f"def compute_score(**given):\n    {code}\n")
    limit = 60 if "time" in code else 500
    ended, said = dry_run_of(*own.overrides(*reward, *overrides), timeout_s=limit)
    assert ended == 1, said
    assert [each for each in words if each not in said] == [], said
