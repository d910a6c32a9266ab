"""A tiny model, and a folder of a user's own."""

import pytest

from tests.support.own_jobs import OwnJob


@pytest.fixture
def own(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return OwnJob(tmp_path, tiny_model)
