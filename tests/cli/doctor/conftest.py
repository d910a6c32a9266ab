"""A job that can start, and what the doctor finds once it is changed."""

from copy import deepcopy

import pytest
from omegaconf import OmegaConf

from tests.support.doctored_job import RAN, write_files
from tests.support.verl_config import compose_job
from verl_padding.cli.doctor.finding import run_check
from verl_padding.cli.doctor.job import startup, verls_own_check


@pytest.fixture(autouse=True)
def _on_this_cpu(monkeypatch):
    """What else runs on this machine is nothing to these jobs."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    write_files(folder)
    return folder


@pytest.fixture(scope="session")
def verls():
    return compose_job()


@pytest.fixture(scope="session")
def composed(job):
    return compose_job(*job)


@pytest.fixture
def found(composed, verls, folder, monkeypatch):
    """Findings on the job with changes: subject -> (verdict, message)."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def found(changes):
        config = deepcopy(composed)
        for setting, value in changes.items():
            OmegaConf.update(config, setting, value, force_add=True)
        both = [*startup(config, verls), *run_check("verl", verls_own_check(config))]
        assert not (folder / RAN).exists()  # nothing of the user's code was run
        return {each.subject: (each.verdict, each.message) for each in both[::-1]}

    return found


@pytest.fixture
def assert_named(found):
    """Looks for a finding on changes, by its subject and words of its message."""

    def assert_named(changes, subject, words):
        named = {key: each for key, each in found(changes).items() if key.startswith(subject)}
        assert named, found(changes)
        verdict, message = next(iter(named.values()))
        assert verdict in ("wrong", "warning")
        assert words in message
        assert message.rstrip()[-1] in ".?"

    return assert_named
