"""Who may import what: the seams that let verl or TransferQueue change without the rest noticing."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "verl_padding"


def importers_of(module: str) -> set[str]:
    """Files of the package that import ``module`` or something below it, at any level of indentation."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            if any(name == module or name.startswith(module + ".") for name in names):
                found.add(path.relative_to(PACKAGE).as_posix())
    return found


def test_one_module_knows_transfer_queue():
    assert importers_of("transfer_queue") == {"pads/queue.py"}


def test_one_package_knows_verls_trainers():
    assert importers_of("verl.trainer.ppo.v1") == {"trainer/mixin.py", "trainer/trainers.py"}


@pytest.mark.parametrize("module", ["torch", "verl", "ray", "transfer_queue", "tensordict"])
def test_the_planner_knows_none_of_them(module):
    assert not [path for path in importers_of(module) if path.startswith("plan/")]


def test_the_config_can_be_read_without_torch():
    light = {"config.py", "errors.py", "plugin.py", "hydra_search_path.py", "hydra_callback.py", "job.py", "cli.py"}
    assert not light & importers_of("torch")
