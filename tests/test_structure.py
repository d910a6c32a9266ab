"""Who may import what: the seams that let verl or TransferQueue change without the rest
noticing."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "verl_padding"
RECIPES = PACKAGE.parent / "recipes"
FLOORS = (
    *(
        "version",
        "errors",
        "plan",
        "pads",
        "config",
        "record",
        "job",
        "prefix_sharing",
        "verl_fixes",
        "worker",
        "driver",
        "on_cpu",
    ),
    *("entry", "plugin", "recipes", "cli", "__main__"),
)
"""Modules and packages of the top floor, each above those that it may import."""
DOORS = {
    "verl_fixes": {"driver/stock_guard.py", "worker/padded_engine.py", "entry/import_hooks.py"},
    "on_cpu": {"entry/import_hooks.py"},
}
"""What is not the plug-in itself -> the modules that may import it, beside the commands of
``cli/``."""


@cache
def targets_of(path):
    """What a file imports, at any level of indentation: modules, and what is taken from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import, which this test does not follow"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def importers_of(module):
    """Files of the package that import ``module`` or something below it."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(f"{target}.".startswith(f"{module}.") for target in targets_of(path))
    }


def imports():
    """Module -> modules of ours that it imports."""
    files = [*PACKAGE.rglob("*.py"), *RECIPES.rglob("*.py")]
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in files
    }
    ours = {
        name.removeprefix("verl_padding.").removesuffix(".__init__"): path
        for name, path in modules.items()
    }
    found = {}
    for name, path in ours.items():
        below = {
            t.removeprefix("verl_padding.")
            for t in targets_of(path)
            if t.startswith("verl_padding.")
        }
        found[name] = below & ours.keys() - {name}
    return found


def test_each_module_of_more_than_60_lines_has_tests_of_its_name():
    """A file, or a folder."""
    paths = [path for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 60]
    modules = [path.relative_to(PACKAGE) for path in paths]
    assert len(modules) > 80
    tests = Path(__file__).parent
    assert not [
        module.as_posix()
        for module in modules
        if not (tests / module.parent / f"test_{module.name}").is_file()
        and not (tests / str(module.with_suffix("")).removesuffix("/__init__")).is_dir()
    ]


def test_each_package_says_what_it_holds_and_imports_what_it_says_it_may():
    for package in [*sorted(PACKAGE.glob("*/__init__.py")), RECIPES / "__init__.py"]:
        name = package.parent.name
        said = ast.get_docstring(ast.parse(package.read_text())) or ""
        holds, _, may = said.partition("\n\nMay import: ")
        assert holds.split("\n")[0].endswith(".")
        may = " ".join(may.split("\n\n")[0].split())
        assert may.endswith("."), name
        imported = {
            t.split(".")[0]
            for m, targets in imports().items()
            if m.split(".")[0] == name
            for t in targets
        }
        assert imported - {name, "verl_padding"} == set(may.split(".")[0].split(", ")) - {
            "nothing"
        }, name


def test_no_import_runs_back_up():
    floor_of = {name: floor for floor, name in enumerate(FLOORS)}
    arrows = [
        (name, target)
        for name, targets in imports().items()
        for target in targets
        if name != "verl_padding"
    ]
    assert len(arrows) > 200
    assert not [
        f"{name} -> {target}"
        for name, target in arrows
        if name != "__init__" and floor_of[name.split(".")[0]] < floor_of[target.split(".")[0]]
    ]


def test_no_imports_go_round_in_a_circle():
    TopologicalSorter(imports()).prepare()  # raises CycleError, with the circle


def test_one_module_knows_transfer_queue():
    assert importers_of("transfer_queue") == {"pads/queue.py"}


def test_one_package_knows_verls_trainers():
    knowing = {path.split("/")[0] for path in importers_of("verl.trainer.ppo.v1")}
    assert knowing == {"driver"}


def test_no_benchmark_imports_a_test():
    files = [*(PACKAGE.parent / "benchmarks").rglob("*.py")]
    assert len(files) > 10
    assert not [path for path in files if any(t.startswith("tests") for t in targets_of(path))]


@pytest.mark.parametrize(("package", "doors"), DOORS.items())
def test_the_plug_in_leaves_itself_by_its_doors_alone(package, doors):
    outside = {
        path
        for path in importers_of(f"verl_padding.{package}")
        if not path.startswith(f"{package}/")
    }
    assert {path for path in outside if not path.startswith("cli/")} == doors


@pytest.mark.parametrize("module", ["torch", "verl", "ray", "transfer_queue", "tensordict"])
def test_the_planner_knows_none_of_them(module):
    assert not [path for path in importers_of(module) if path.startswith("plan/")]


def test_the_config_can_be_read_without_torch():
    light = ("config.py", "errors.py", "plugin.py", "entry/", "job/", "cli/app.py")
    assert not [path for path in importers_of("torch") if path.startswith(light)]
