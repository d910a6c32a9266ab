"""Mistakes of a user's that verl would meet in a job's first minutes, or never: each is named."""

from copy import deepcopy

import pandas
import pytest
import yaml
from omegaconf import OmegaConf

from tests.support.verl_config import compose_job
from verl_padding.cli.doctor.job import startup, verls_own_check

AGENT, REWARD = "actor_rollout_ref.rollout.agent", "reward.custom_reward_function"
TURNS, A = "actor_rollout_ref.rollout.multi_turn", "actor_rollout_ref.actor"
LOOPS, LOOP = f"{AGENT}.agent_loop_config_path", f"{AGENT}.default_agent_loop"
MODEL, TRAIN = "actor_rollout_ref.model.path", "data.train_files"
SAMPLER = "trainer.v1.sampler.custom_sampler"
ROW = {
    "prompt": [{"role": "user", "content": "one and one"}],
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "2"},
}
RAN = "ran"
CODE = f"""
import pathlib
pathlib.Path({RAN!r}).touch()


class Mine:
    pass


def compute_score(**given):
    return 1.0
"""


def write_files(folder):
    """Files of a user's own, some of them with mistakes."""
    data = {
        "train": [ROW] * 8,
        "few": [ROW] * 3,
        "no_prompt": [{"data_source": "mine"}] * 8,
        "no_source": [{"prompt": ROW["prompt"]}] * 8,
        "own_source": [ROW | {"data_source": "mine"}] * 8,
        "own_agent": [ROW | {"agent_name": "mien"}] * 8,
        "texts": [ROW | {"prompt": "one and one"}] * 8,
    }
    for name, rows in data.items():
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    loops = {"agent": "code.Mine", "no_class": "code.Mien", "no_module": "no_code.Mine"}
    for name, target in loops.items():
        entry = [{"name": "mine", "_target_": target.replace("code", "code_of_mine")}]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(entry))
    (folder / "no_names.yaml").write_text("- mine: code_of_mine.Mine\n")
    (folder / "no_list.yaml").write_text("name: mine\n_target_: code_of_mine.Mine\n")
    (folder / "no_text.yaml").write_text("- name: mine\n  _target_: 3\n")
    (folder / "broken.yaml").write_text("- name: [\n")
    (folder / "code_of_mine.py").write_text(CODE)
    (folder / "broken.py").write_text("def compute_score(:\n")
    (folder / "zero.py").write_bytes(b"\0")
    (folder / "broken.parquet").write_text("nothing")
    (folder / "rows.csv").write_text("prompt\n")
    (folder / "empty").mkdir()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def verls():
    return compose_job()


@pytest.fixture(scope="module")
def job(tiny_model):
    return compose_job(
        "+local=cpu",
        f"{MODEL}={tiny_model}",
        f"{TRAIN}=train.parquet",
        "data.val_files=train.parquet",
        "data.train_batch_size=8",
        f"{A}.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
    )


@pytest.fixture
def found(job, verls, folder, monkeypatch):
    """Findings on the job with changes: subject -> (verdict, message)."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def found(changes):
        config = deepcopy(job)
        for setting, value in changes.items():
            OmegaConf.update(config, setting, value, force_add=True)
        both = [*startup(config, verls), *verls_own_check(config)]
        assert not (folder / RAN).exists()  # nothing of the user's code was run
        return {each.subject: (each.verdict, each.message) for each in both[::-1]}

    return found


def test_a_job_without_a_mistake_is_found_to_have_none(found):
    changes = {LOOPS: "agent.yaml", LOOP: "mine", f"{REWARD}.path": "code_of_mine.py"}
    named = {f"{REWARD}.name": "compute_score", f"{SAMPLER}.path": "pkg://code_of_mine"}
    assert found({}) == {}
    assert found(changes | named | {f"{SAMPLER}.name": "Mine"}) == {}


def test_a_parser_that_modules_of_the_job_may_register_is_warned_of(found, monkeypatch):
    parser = {f"{TURNS}.format": "mine"}
    assert found(parser)[f"{TURNS}.format"][0] == "wrong"
    of_a_loop = found(parser | {LOOPS: "agent.yaml", LOOP: "mine"})
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "code_of_mine")
    for warned in (of_a_loop, found(parser)):
        assert warned[f"{TURNS}.format"][0] == "warning"


def test_keys_of_a_users_own_are_no_more_than_warned_of(found):
    of_users = {"speed": "fast", "strategy": "rows", "my_padding": 3, "rewards": {"scale": 2}}
    assert {key: verdict for key, (verdict, _) in found(of_users).items()} == dict.fromkeys(
        of_users, "warning"
    )
    assert found({"data.apply_chat_template_kwargs.padding": True}) == {}


MISTAKES = [
    ({LOOP: "single_turn_agnt"}, LOOP, "single_turn_agent"),
    ({LOOPS: "agent.yaml", LOOP: "mien"}, LOOP, "mine"),
    ({LOOPS: "none.yaml"}, LOOPS, "none.yaml"),
    ({LOOPS: "no_class.yaml"}, LOOPS, "Mine"),
    ({LOOPS: "no_module.yaml"}, LOOPS, "no_code"),
    ({LOOPS: "no_text.yaml"}, LOOPS, "3"),
    ({f"{AGENT}.agent_loop_manager_class": "code_of_mine.Mien"}, f"{AGENT}.agent_loop_m", "Mine"),
    ({f"{REWARD}.path": "none.py"}, f"{REWARD}.path", "none.py"),
    ({f"{REWARD}.path": "broken.py"}, f"{REWARD}.path", "line 1"),
    ({f"{REWARD}.path": "zero.py"}, f"{REWARD}.path", "null bytes"),
    (
        {f"{REWARD}.path": "code_of_mine.py", f"{REWARD}.name": "compute_scor"},
        f"{REWARD}.name",
        "compute_score",
    ),
    ({f"{SAMPLER}.path": "pkg://no_code"}, f"{SAMPLER}.path", "no_code"),
    ({f"{TURNS}.function_tool_path": "none.py"}, f"{TURNS}.function_tool_path", "none.py"),
    ({"actor_rollout_ref.model.external_lib": "no_code"}, "actor_rollout_ref.model.ext", "no_code"),
    ({"trainer.checkpoint_callback_class": "no_code.Mine"}, "trainer.checkpoint_call", "no_code"),
    (
        {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/none"},
        "trainer.resume_from_path",
        "/none",
    ),
    ({"trainer.resume_mode": "resume_path"}, "trainer.resume_from_path", "global_step_"),
    ({MODEL: "/none/model"}, MODEL, "/none/model"),
    ({MODEL: "no_such_owner/no_such_model"}, MODEL, "no_such_model"),
    ({MODEL: "empty/model"}, MODEL, "empty/model"),
    ({MODEL: "empty"}, MODEL, "empty"),
    ({TRAIN: "none.parquet"}, TRAIN, "none.parquet"),
    ({"data.val_files": ["none.parquet"]}, "data.val_files", "none.parquet"),
    ({TRAIN: []}, TRAIN, "no file"),
    ({TRAIN: "broken.parquet"}, TRAIN, "broken.parquet"),
    ({TRAIN: "rows.csv"}, TRAIN, "rows.csv"),
    ({TRAIN: "few.parquet"}, TRAIN, "data.train_batch_size=8"),
    ({TRAIN: "no_prompt.parquet"}, TRAIN, "data.prompt_key"),
    ({TRAIN: "no_source.parquet"}, TRAIN, "data_source"),
    ({TRAIN: "own_source.parquet"}, f"{REWARD}.path", "mine"),
    ({TRAIN: "own_agent.parquet"}, TRAIN, "mien"),
    ({TRAIN: "texts.parquet"}, TRAIN, "messages"),
    ({"data.max_prompt_length": 4}, "data.max_prompt_length", "8 of 8"),
    ({"algorithm.adv_estimator": "grpoo"}, "algorithm.adv_estimator", "grpo"),
    ({f"{A}.policy_loss.loss_mode": "vanila"}, f"{A}.policy_loss.loss_mode", "vanilla"),
    ({f"{A}.loss_agg_mode": "token-meen"}, "verl", "token-meen"),
    ({f"{A}.kl_loss_type": "low_var"}, f"{A}.kl_loss_type", "low_var_kl?"),
    ({"algorithm.kl_ctrl.type": "fix"}, "algorithm.kl_ctrl.type", "fixed"),
    ({"reward.reward_manager.name": "naiv"}, "reward.reward_manager.name", "naive"),
    ({"actor_rollout_ref.rollout.name": "vlm"}, "actor_rollout_ref.rollout.name", "vllm"),
    ({"actor_rollout_ref.rollout.name": "???"}, "actor_rollout_ref.rollout.name", "not set"),
    ({f"{TURNS}.format": "hermess"}, f"{TURNS}.format", "hermes"),
    ({"trainer.logger": ["consol"]}, "trainer.logger", "console"),
    ({"trainer.resume_mode": "resum"}, "trainer.resume_mode", "resume_path"),
    (
        {"algorithm.adv_estimator": "rloo", "actor_rollout_ref.rollout.n": 1},
        "actor_rollout_ref.rollout.n",
        "rloo",
    ),
    ({f"{A}.optim.lr": "fast"}, f"{A}.optim.lr", "1e-06"),
    ({f"{A}.optim.lr": -1}, f"{A}.optim.lr", "-1"),
    ({f"{A}.optim.weight_decay": float("nan")}, f"{A}.optim.weight_decay", "nan"),
    ({f"{A}.optim.optimizer": "AdamX"}, f"{A}.optim.optimizer", "Adam"),
    ({f"{A}.optim.optimizer_impl": "torch.optin"}, f"{A}.optim.optimizer", "torch.optin"),
    ({f"{A}.entropy_coeff": None}, f"{A}.entropy_coeff", "null"),
    ({"actor_rollout_ref.rollout.n": "eight"}, "actor_rollout_ref.rollout.n", "eight"),
    ({"trainer.val_before_train": "no"}, "trainer.val_before_train", "false"),
    ({"actor_rollout_ref.rollout.m": 4}, "verl", "'m'"),
    ({"paddng": "fast"}, "paddng", "+padding=fast"),
    ({"trainer.padding": "fast"}, "trainer.padding", "+padding=fast"),
    ({"data.max_prompt_lenght": 64}, "data.max_prompt_lenght", "data.max_prompt_length"),
    ({"strategy": "rows"}, "strategy", "padding.strategy"),
    ({"key_of_mine": 1}, "key_of_mine", "1"),
]
"""What is changed, the setting that is named, and words of the message."""


@pytest.mark.parametrize(("changes", "subject", "words"), MISTAKES, ids=lambda part: str(part)[:60])
def test_a_mistake_is_named_with_its_setting_and_a_fix(changes, subject, words, found):
    named = {key: finding for key, finding in found(changes).items() if key.startswith(subject)}
    assert named, found(changes)
    verdict, message = next(iter(named.values()))
    assert verdict in ("wrong", "warning")
    assert words in message
    assert message.rstrip()[-1] in ".?"


def test_prompts_that_are_all_left_out_are_a_mistake(found):
    changes = {"data.max_prompt_length": 4, "data.filter_overlong_prompts": True}
    assert found(changes)["data.max_prompt_length"][0] == "wrong"


@pytest.mark.parametrize("loops", ["no_names.yaml", "no_list.yaml", "broken.yaml"])
def test_a_file_of_agent_loops_that_verl_cannot_read_is_refused(loops, found):
    with pytest.raises(ValueError, match=loops):
        found({LOOPS: loops})
