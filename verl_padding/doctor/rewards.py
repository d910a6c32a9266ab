"""The function that scores a response, and the reward manager that calls it. Neither is run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import partial

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.bound_names import Function
from verl_padding.doctor.finding import Finding, looked_for, not_looked_at, ok, warning, wrong
from verl_padding.doctor.named_objects import PACKAGE_PREFIX, file_of, refuse_missing_imports, refuse_missing_object
from verl_padding.doctor.returned import SCORE, keys_beside_scores, never_returns, no_scores
from verl_padding.doctor.signatures import defined_in, refuse_other_parameters

SCORES = "verl.utils.reward_score"
FUNCTION = "reward.custom_reward_function"
MANAGER = "reward.reward_manager.name"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl's reward managers give a reward function, by name."""
MORE_BESIDE_A_MODEL = ("reward_router_address", "reward_model_tokenizer")
OF_NUMBERS = "acc"
"""Key under which verl's reward managers put a score that is given back by itself."""
BY_MANAGERS = ("overlong_reward", "overlong", "timeout", "error")
"""Keys that some of them add."""
REWARD = "reward"
"""What verl filters groups by that takes no key: the sum of a row's rewards."""
WAITS_FOR_NONE = ("remote",)
"""verl's reward managers that refuse an ``async def``."""


def rewards_of_job(config: DictConfig, *, asked: bool) -> Iterator[Finding]:
    """The job's reward function, if it has one, and its reward manager.

    Args:
        asked: whether the agent loops certainly leave rewards to it.
    """
    yield from _function(config)
    yield _manager(config)
    if asked:
        yield from _metric_of_groups(config)
    workers = config.reward.get("num_workers")
    if asked and isinstance(workers, int) and workers < 1:
        yield wrong("reward.num_workers", f"{workers}: nobody is left to compute the rewards. Set it to 1 or more.")


def _is_of_verl(config: DictConfig) -> bool:
    """Whether the reward manager is one that comes with verl: one of the user's calls a function as it likes."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    manager = config.reward.reward_manager
    return bool(manager.source == "register" and manager.name in REWARD_MANAGER)


def read_by_verl(config: DictConfig) -> bool:
    """Whether one of verl's own reward managers reads data_source and reward_model of each row."""
    reward = config.reward
    if config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class"):
        return False  # it may do so itself
    by_a_model = reward.reward_model.enable and not reward.custom_reward_function.path
    return _is_of_verl(config) and not by_a_model


def _function(config: DictConfig) -> Iterator[Finding]:
    path, name = (OmegaConf.select(config, f"{FUNCTION}.{key}") for key in ("path", "name"))
    if not path:
        return
    setting, told = f"{FUNCTION}.path", f"{path} ({name})"
    found = looked_for(setting, told, partial(refuse_missing_object, path, name))
    if found.verdict == "ok" and _is_of_verl(config):
        found = looked_for(setting, told, partial(_refuse_as_verl_calls, config, path, name))
        kinds, is_all = _no_scores_of(path, name)
        if found.verdict == "ok" and kinds and not is_all:
            found = warning(
                setting,
                f"{told}: in some place {name}() returns {', '.join(sorted(kinds))}, of which verl makes no score: it "
                f"takes a number, or a mapping with {SCORE!r}. Correct the return.",
            )
    yield found


def _metric_of_groups(config: DictConfig) -> Iterator[Finding]:
    """Whether the reward function gives what finished groups are filtered by; nothing where it cannot be told."""
    groups = config.algorithm.get("filter_groups")
    path, name = (OmegaConf.select(config, f"{FUNCTION}.{key}") for key in ("path", "name"))
    own_sampler = OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path")
    if not groups or not groups.get("enable") or own_sampler or not path or not _is_of_verl(config):
        return
    try:
        function = defined_in(file_of(path), name)
    except LookupError:  # told with the function
        return
    metric = groups.get("metric")
    keys = keys_beside_scores(function, OF_NUMBERS) if isinstance(function, Function) else None
    if keys is None or metric in (REWARD, *keys, *BY_MANAGERS):
        return
    yield wrong(
        "algorithm.filter_groups.metric",
        f"{metric}: the reward function {name}() leaves no such value with a row, only {', '.join(sorted(keys))}. "
        f"Choose one of these, or {REWARD}.",
    )


def _no_scores_of(path: str, name: str) -> tuple[set[str], bool]:
    """As `no_scores` of a function that is plainly there; nothing of any other."""
    function = defined_in(file_of(path), name)
    return no_scores(function) if isinstance(function, Function) else (set(), False)


def _refuse_as_verl_calls(config: DictConfig, path: str, name: str) -> None:
    """
    Raises:
        LookupError: verl's reward managers cannot call the function, or get no score from it, with a sentence.
    """
    more = MORE_BESIDE_A_MODEL if config.reward.reward_model.enable else ()
    own = tuple(map(str, OmegaConf.select(config, f"{FUNCTION}.reward_kwargs") or ()))
    refuse_other_parameters(path, name, (*ARGUMENTS, *more, *own))
    function = defined_in(file_of(path), name)
    if isinstance(function, Function) and never_returns(function):
        raise LookupError(f"{name}() returns nothing, and a score is needed")
    kinds, is_all = _no_scores_of(path, name)
    if kinds and is_all:
        raise LookupError(
            f"{name}() returns {', '.join(sorted(kinds))}, and verl takes a number, or a mapping with {SCORE!r}"
        )
    manager = config.reward.reward_manager.name
    if isinstance(function, ast.AsyncFunctionDef) and manager in WAITS_FOR_NONE:
        raise LookupError(f"{name}() is an async function, which verl's reward manager {manager!r} does not take")


def _manager(config: DictConfig) -> Finding:
    """As verl's ``resolve_reward_manager_cls`` finds it."""
    manager, setting = config.reward.reward_manager, MANAGER
    if manager.source == "importlib":
        path = manager.module.path
        if not path:
            return wrong(
                "reward.reward_manager.module.path", f"{path}: source=importlib takes the manager from a file. Name it."
            )
        return looked_for(setting, f"{manager.name}, of {path}", partial(refuse_missing_object, path, manager.name))
    if manager.source != "register":
        return wrong("reward.reward_manager.source", f"{manager.source}: not a choice. Choices: register, importlib.")
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    if manager.name in REWARD_MANAGER:
        return ok(setting, manager.name)
    if config.reward.custom_reward_function.path:
        return not_looked_at(setting, f"{manager.name}: the file of the reward function may register it")
    return wrong(setting, f"{manager.name}: no reward manager of this name. Choices: {', '.join(REWARD_MANAGER)}.")


def scores_source(source: object) -> bool:
    """Whether verl's own scores, which a job without a reward function has, know a data source, which is a text."""
    return isinstance(source, str) and _branch_of(source) is not None


def missing_to_score(source: str) -> str:
    """What the module of verl's score for a data source that it knows imports and is not here; "" for nothing."""
    branch = _branch_of(source)
    assert branch is not None
    for module in (name.name for node in branch.body if isinstance(node, ast.ImportFrom) for name in node.names):
        file = file_of(f"{PACKAGE_PREFIX}{SCORES}.{module}")
        try:
            if file is not None:
                refuse_missing_imports(file, package=SCORES)
        except LookupError as problem:
            return str(problem)
    return ""


def _branch_of(source: str) -> ast.If | None:
    """Where verl's own function chooses the score for a data source; None where it has none."""
    from verl.utils.reward_score import default_compute_score

    tree = ast.parse(inspect.getsource(inspect.unwrap(default_compute_score)))
    branch = next(node for node in ast.walk(tree) if isinstance(node, ast.If))  # outer ones come first
    while True:
        test = ast.fix_missing_locations(ast.Expression(branch.test))
        # verl's own comparisons of a text with its names: nothing of the user's is run
        if eval(compile(test, "default_compute_score", "eval"), {"data_source": source}):
            return branch
        if len(branch.orelse) != 1 or not isinstance(branch.orelse[0], ast.If):
            return None
        branch = branch.orelse[0]
