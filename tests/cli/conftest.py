"""A job that can start, for the tests of the doctor, and a file of rows."""

import pandas
import pytest

from tests.cli.test_plan import rows_of, write_lines
from tests.support.doctored_job import ROW
from tests.support.hostile_run import hostile  # noqa: F401  (a fixture)


@pytest.fixture(scope="session")
def job(tmp_path_factory, tiny_model):
    """Overrides of a job that can start."""
    folder = tmp_path_factory.mktemp("job")
    file = folder / "train.parquet"
    pandas.DataFrame([ROW] * 8).to_parquet(file)
    return [
        "+local=cpu",
        f"actor_rollout_ref.model.path={tiny_model}",
        *(f"data.{name}_files={file}" for name in ("train", "val")),
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
