"""Files of a user's own, some of them with mistakes, and what the doctor says of a job with
them."""

import pandas
import pytest
import yaml

ROLLOUT, A = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
AGENT, REWARD = f"{ROLLOUT}.agent", "reward.custom_reward_function"
TURNS, ENGINE = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.checkpoint_engine"
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
    (folder / "tools.yaml").write_text("tools: [{class_name: no_code.Tool}]\n")
    (folder / "broken.yaml").write_text("- name: [\n")
    (folder / "code_of_mine.py").write_text(CODE)
    (folder / "broken.py").write_text("def compute_score(:\n")
    (folder / "broken.parquet").write_text("nothing")
    (folder / "rows.csv").write_text("prompt\n")
    (folder / "empty").mkdir()


def mistakes(*cases):
    """Parameters of a test: of each case what is changed, words of the message, and the setting
    that is named, if it is not the last one that is changed."""
    whole = [(changes, *(subject or [*changes][-1:]), words) for changes, words, *subject in cases]
    names = ("changes", "subject", "words")
    return pytest.mark.parametrize(names, whole, ids=lambda part: str(part)[:60])
