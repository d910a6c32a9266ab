"""A tiny model, and a folder of a user's own."""

import sys

import pytest
from verl.experimental.agent_loop import agent_loop
from verl.tools import function_tool

from tests.on_cpu.dry_run.own_jobs import OwnJob


@pytest.fixture
def own(tmp_path, tiny_model, monkeypatch) -> OwnJob:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(function_tool, "FUNCTION_TOOL_REGISTRY", {})
    monkeypatch.setattr(agent_loop, "_agent_loop_registry", dict(agent_loop._agent_loop_registry))
    before = set(sys.modules)
    yield OwnJob(tmp_path, tiny_model)
    for name in set(sys.modules) - before:
        if name.endswith("_of_mine"):
            del sys.modules[name]
