"""A job that can start, for the tests of the doctor, and a file of rows."""

import pandas
import pytest

from tests.cli.test_plan import rows_of, write_lines
from tests.support.hostile_run import hostile  # noqa: F401  (a fixture)


@pytest.fixture(scope="session")
def job(tmp_path_factory, tiny_model):
    """Overrides of a job that can start."""
    folder = tmp_path_factory.mktemp("job")
    row = {
        "prompt": [{"role": "user", "content": "1+1"}],
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    pandas.DataFrame([row] * 16).to_parquet(folder / "train.parquet")
    return [
        "+local=cpu",
        f"actor_rollout_ref.model.path={tiny_model}",
        f"data.train_files={folder / 'train.parquet'}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]


@pytest.fixture
def rows():
    return rows_of(9)


@pytest.fixture
def path(rows, tmp_path):
    return write_lines(tmp_path / "rows.jsonl", rows)
