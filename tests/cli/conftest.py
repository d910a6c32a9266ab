"""A job that can start, for the tests of the doctor."""

from pathlib import Path

import pytest
from omegaconf import DictConfig, open_dict

from tests.support.jobs_for_doctor import FLAG, Machine, prompts, with_settings
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.local.tiny_models import make_tiny_model


@pytest.fixture
def no_ray_cluster(monkeypatch) -> None:
    """What else runs on this machine is nothing to these jobs."""
    monkeypatch.setenv("RAY_ADDRESS", "local")


@pytest.fixture(autouse=True)
def time_for_all_prompts(monkeypatch) -> None:
    """However slow the machine is just now: the doctor tries as many prompts as it has seconds for."""
    for module in ("chat_templates", "prompts"):
        monkeypatch.setattr(f"verl_padding.doctor.{module}.SECONDS", 60)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A model's folder; nobody writes into it."""
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def job(tmp_path_factory, tiny_model) -> list[str]:
    """Overrides of a job that can start."""
    folder = tmp_path_factory.mktemp("job")
    prompts(16).to_parquet(folder / "train.parquet")
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


@pytest.fixture(scope="session")
def composed(job) -> DictConfig:
    """The config of that job with the flag. Nobody writes into it."""
    return compose_job(JobArguments(overrides=(*job, FLAG)))


@pytest.fixture
def composed_once(job, composed, monkeypatch) -> None:
    """Hydra, which takes most of the time of a look at a job, is not asked anew for the job with other values."""

    def compose(arguments: JobArguments) -> DictConfig:
        assert set(job) <= set(arguments.overrides), "for other jobs, Hydra has to be asked"
        others = [override for override in arguments.overrides if override not in (*job, FLAG)]
        config = with_settings(composed, others)
        if FLAG not in arguments.overrides:
            with open_dict(config):
                del config.padding
        return config

    monkeypatch.setattr("verl_padding.doctor.job.compose_job", compose)


@pytest.fixture
def machine(tmp_path, monkeypatch, tiny_model) -> Machine:
    return Machine(tmp_path, monkeypatch, tiny_model)
