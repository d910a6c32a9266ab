"""A job's config is composed as Hydra composes it when the job runs, with the values that Hydra
itself knows then."""

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from verl_padding.errors import PaddingConfigError
from verl_padding.job.composition import JobArguments, compose_job, resolved


@pytest.fixture
def hydra_as_in_a_new_process(monkeypatch):
    """It has composed no config, and OmegaConf cannot resolve its values."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    monkeypatch.delitem(BaseContainer._resolvers, "hydra", raising=False)


@pytest.mark.usefixtures("hydra_as_in_a_new_process")
def test_hydras_own_values_are_those_of_each_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for project in ("one", "two"):
        overrides = (
            "hydra.run.dir=outputs/${hydra:job.name}/${trainer.project_name}",
            f"trainer.project_name={project}",
            "trainer.default_local_dir=${hydra:runtime.output_dir}",
            "trainer.rollout_data_dir=${hydra:run.dir}",
            "trainer.validation_data_dir=${hydra:runtime.cwd}",
        )
        config = compose_job(JobArguments(overrides=overrides))
        assert "hydra" not in config
        folder = f"outputs/main_ppo/{project}"
        assert config.trainer.rollout_data_dir == folder
        assert config.trainer.default_local_dir == f"{tmp_path}/{folder}"
        assert config.trainer.validation_data_dir == str(tmp_path)


def test_a_resolved_config_does_not_follow_the_environment(monkeypatch):
    config = OmegaConf.create({"a": "${oc.env:VERL_PADDING_A,1}", "b": "${a}"})
    OmegaConf.set_struct(config, True)
    of_now = resolved(config)
    monkeypatch.setenv("VERL_PADDING_A", "2")
    assert (config.b, of_now.b, OmegaConf.is_struct(of_now)) == ("2", "1", True)
    with pytest.raises(PaddingConfigError, match=r"^a="):
        resolved(OmegaConf.create({"a": r"\${oc.env:VERL_PADDING_A}"}))
