"""Jobs that the doctor looks at: what a user can change about one that can start, and what is found then."""

import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from pathlib import Path

import pandas
import pytest
import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from tests.support.fresh_processes import Fresh
from verl_padding.doctor import packages
from verl_padding.doctor.devices import devices_of_job
from verl_padding.doctor.environment import variables_of_job
from verl_padding.doctor.finding import Finding, Look
from verl_padding.doctor.installation import plug_in
from verl_padding.doctor.interfaces import interfaces_of_job
from verl_padding.doctor.job import look_at_files, look_at_first_step, looks_at_job
from verl_padding.doctor.named_objects import is_module
from verl_padding.doctor.packages import packages_of_job
from verl_padding.doctor.passed_on import values_for_rollout, values_passed_on
from verl_padding.doctor.settings import ignored_settings, missing_settings
from verl_padding.job.composition import JobArguments

AGENT = "actor_rollout_ref.rollout.agent"
MODEL = "actor_rollout_ref.model.path"
FLAG = "+padding=prompt"
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"
MESSAGES = [{"role": "user", "content": "1+1"}]
LOOP = """\
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Mine(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
"""
"""The beginning of an agent loop of a user's own."""
SCORED = """\
        return AgentLoopOutput(
            prompt_ids=[1], response_ids=[2], response_mask=[1], num_turns=2, metrics={}, reward_score=1.0,
            response_logprobs=[-1.0],
            extra_fields={"min_global_steps": 1, "max_global_steps": 1},
        )
"""


def prompts(number: int, **columns: list) -> pandas.DataFrame:
    """As verl's own scripts write them."""
    row = {
        "prompt": MESSAGES,
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    return pandas.DataFrame([row] * number).assign(**columns)


class Machine:
    """A folder of a user's, and the environment; what a test changes there is a reason why a job cannot start."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path):
        self.folder, self.patch, self.tiny_model = folder, monkeypatch, tiny_model

    def file(self, name: str, text: str = "") -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def data(self, data: pandas.DataFrame) -> list[str]:
        """Overrides of a job with this data, which with +local=cpu is its data for validation, too."""
        data.to_parquet(self.folder / "data.parquet")
        return [f"data.train_files={self.folder / 'data.parquet'}"]

    def model(self) -> Path:
        """A copy of the job's own model."""
        return Path(shutil.copytree(self.tiny_model, self.folder / "model"))

    def loop(self, text: str) -> list[str]:
        """Overrides of a job whose agent loop `Mine` is in a module of this text."""
        module = f"loops_of_{self.folder.name}"
        self.file(f"{module}.py", text)
        self.patch.syspath_prepend(self.folder)
        path = self.file("agent.yaml", f"- name: mine\n  _target_: {module}.Mine\n")
        return [f"{AGENT}.agent_loop_config_path={path}", f"{AGENT}.default_agent_loop=mine"]

    def lacks(self, package: str) -> None:
        """Whether it is installed here or not."""
        self.patch.setattr(packages, "is_module", lambda name: name.split(".")[0] != package and is_module(name))


Kind = Callable[[Machine], list[str]]
"""Overrides of a job of some kind, which the name of the function tells."""
Reasons = dict[Kind, tuple[str, str]]
"""A kind of jobs that cannot start -> the setting that is told, and part of what is."""


def with_settings(composed: DictConfig, overrides: list[str]) -> DictConfig:
    """A copy with some settings changed or added, which takes far less than composing it anew."""
    config = deepcopy(composed)
    with open_dict(config):
        for override in overrides:
            key, _, value = override.lstrip("+").partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value), merge=False)
    return config


def contents_of(composed: DictConfig, overrides: list[str]) -> list[Finding]:
    """What is found of a job in a tenth of the time: all but what the plan and verl's own checks say."""
    config = with_settings(composed, overrides)
    settings = chain(missing_settings(config), ignored_settings(config), values_passed_on(config))
    here = chain(packages_of_job(config), values_for_rollout(config), devices_of_job(config, platform()))
    around = chain(variables_of_job(config), interfaces_of_job(config))
    files = look_at_files(config)
    return [*plug_in(), *settings, *here, *around, *files.findings, *look_at_first_step(config, files).findings]


def findings_of(*overrides: str) -> list[Finding]:
    """All that is found about a job; about the installation, only what its environment adds."""
    looks = [Look.at("plug-in", plug_in), *looks_at_job(JobArguments(overrides=overrides), platform())]
    return [finding for look in looks for finding in look.findings]


def platform() -> str:
    """That the job will have."""
    return os.environ.get("VERL_PLATFORM", "")


def matters(found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.verdict != "ok"]


def assert_told(found: list[Finding], setting: str, told: str) -> None:
    """One of the findings says that this is wrong with the setting, and none is a traceback."""
    wrong = [finding for finding in found if finding.verdict == "wrong"]
    assert [finding for finding in wrong if finding.subject == setting and told in finding.told], wrong
    assert not [finding.details for finding in found if finding.details]


def assert_tried_and_well(found: list[Finding]) -> None:
    """Nothing is the matter, and prompts were taken as far as a job takes them."""
    assert not matters(found)
    assert [each for each in found if each.subject == "data.train_files" and each.told.endswith(" tried")]


def doctor_in_a_process(*arguments: str, before: str = "", **environment: str) -> Fresh:
    """The command, with some Python before it."""
    code = f"{before}import sys; sys.argv[0] = 'verl-padding'; from verl_padding.cli.app import app; app()"
    return Fresh(code, ["doctor", *arguments], {"COLUMNS": "200", **environment})
