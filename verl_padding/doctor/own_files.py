"""Files of the user's own that a job's processes load, and the environment variables that these cannot do without."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.agent_loops import LOOPS, loops_of_job
from verl_padding.doctor.certain_code import certain_nodes
from verl_padding.doctor.devices import ray_cluster
from verl_padding.doctor.entries import resolved
from verl_padding.doctor.environment import ENV_VARS, environment_of_job
from verl_padding.doctor.finding import Finding, ok, warning
from verl_padding.doctor.named_objects import PACKAGE_PREFIX, file_of, module_and_name, parsed
from verl_padding.doctor.tools import MULTI_TURN

MODULES = ("reward.custom_reward_function.path", "reward.reward_manager.module.path", "data.custom_cls.path")
TOOLS = f"{MULTI_TURN}.function_tool_path"
SET_BY_OTHERS = ("CUDA_", "KMP_", "LOCAL_", "MASTER_", "NCCL_", "OMP_", "RANK", "RAY_", "VERL_", "VLLM_", "WORLD_SIZE")
"""Beginnings of variables that Ray, verl or torch set in a job's processes."""
INSTALLED = "*.dist-info"
"""What lies beside a package that was installed."""
RUNS_ANYTHING = {"exec", "eval", "__import__"}
LOADS_ANYTHING = {"importlib", "runpy"}
"""Modules of Python's own that run files of others."""
READ = ok("code of your own", "read, not run")


def own_files_of_job(config: DictConfig) -> Iterator[Finding]:
    """Says that there are such files, and which variables they read as they are loaded that are not set."""
    files = dict(_own_files(config))
    if files:
        yield READ
    if ray_cluster(config) or config.trainer.nnodes > 1:
        return  # whose nodes have an environment of their own
    from verl.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV

    known = {*environment_of_job(config), *PPO_RAY_RUNTIME_ENV["env_vars"]}
    for file, setting in files.items():
        try:
            needed = list(variables_needed(file))
        except LookupError:  # told with the file
            continue
        for line, name in needed:
            if name not in known and not name.startswith(SET_BY_OTHERS):
                # A warning: other files of the same process, Hydra or a command around Python's may set it, too.
                yield warning(
                    setting,
                    f"{file}, line {line}: reads os.environ[{name!r}] as it is loaded, and it is set neither in this "
                    f"environment nor in {ENV_VARS}. export {name}=.., or read it with os.environ.get.",
                )


def _own_files(config: DictConfig) -> Iterator[tuple[Path, str]]:
    """(file, the setting that leads to it)"""
    named = [(setting, str(OmegaConf.select(config, setting) or "")) for setting in MODULES]
    named += [(LOOPS, f"{PACKAGE_PREFIX}{_module(loop.target)}") for loop in loops_of_job(config) if not loop.is_verls]
    tools = OmegaConf.select(config, TOOLS)
    named += [(TOOLS, resolved(tools) or tools)] if tools else []
    for setting, name in named:
        try:
            file = file_of(name) if name.removeprefix(PACKAGE_PREFIX) else None
        except LookupError:  # told with the setting
            continue
        if file is not None:
            yield file, setting


def _module(target: str) -> str:
    try:
        return module_and_name(target)[0]
    except LookupError:
        return ""


def variables_needed(file: Path) -> Iterator[tuple[int, str]]:
    """Variables without which a file of Python cannot be loaded, with their lines.

    What follows a line that may set any is let pass: one that calls or imports what is neither Python's nor installed.

    Raises:
        LookupError: it cannot be read as Python, with a sentence.
    """
    beside = file.with_name("__init__.py")
    if beside.is_file() and "env" in beside.read_text(errors="replace"):
        return
    plain = set(dir(builtins)) - RUNS_ANYTHING
    environs: set[str] = set()
    for statement in parsed(file).body:
        for node in certain_nodes([statement]):
            match node:
                case ast.Subscript(slice=ast.Constant(value=str(name)), ctx=ast.Load()):
                    if ast.unparse(node.value) in environs:
                        yield node.lineno, name
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module = statement.module or "" if isinstance(statement, ast.ImportFrom) else ""
            if _loads_others(statement):
                return
            for alias in statement.names:
                bound = alias.asname or alias.name.split(".")[0]
                if (module or alias.name).split(".")[0] in sys.stdlib_module_names - LOADS_ANYTHING:
                    plain.add(bound)
                if module == "os" and alias.name == "environ":
                    environs.add(bound)
                elif not module and alias.name == "os":
                    environs.add(f"{bound}.environ")
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and _may_set(statement, plain, environs):
            return


def _loads_others(statement: ast.Import | ast.ImportFrom) -> bool:
    """Whether it imports what is neither Python's own nor installed."""
    if isinstance(statement, ast.ImportFrom):
        return bool(statement.level) or not _is_installed((statement.module or "").split(".")[0])
    return not all(_is_installed(alias.name.split(".")[0]) for alias in statement.names)


def _is_installed(module: str) -> bool:
    """Whether a module is Python's own or of a package that was installed, which set nothing that is the user's."""
    if module in sys.stdlib_module_names:
        return True
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    place = Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]
    return any(place.glob(INSTALLED))


def _may_set(statement: ast.stmt, plain: set[str], environs: set[str]) -> bool:
    """Whether a statement may change the environment.

    Args:
        plain: names of what is Python's own.
    """
    for node in ast.walk(statement):
        match node:
            case ast.Import() | ast.ImportFrom() if _loads_others(node):
                return True
            case ast.Assign(value=value) if ast.unparse(value) in environs:
                return True
            case ast.Call(func=called):
                root = called
                while isinstance(root, ast.Attribute):
                    root = root.value
                text = ast.unparse(called)
                harmless = isinstance(root, ast.Name) and root.id in plain
                if not harmless or (text.startswith(tuple(environs)) and not text.endswith(".get")):
                    return True
            case ast.Subscript(ctx=ast.Store() | ast.Del()) if ast.unparse(node.value) in environs:
                return True
            case ast.Delete() | ast.AugAssign() if "environ" in ast.unparse(node):
                return True
    return False
