"""What only a worker shows of what blocks a saving: a loss not verl's, a model that draws in
training, an engine that cuts or computes rows in its own way."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch

from verl_padding.job.incompatibility import Incompatibility
from verl_padding.job.savings import OLD_LOG_PROBS, PACKER, SHARING, ZERO_ADVANTAGE_ROWS
from verl_padding.job.verl_losses import POLICY_LOSSES, ZERO_WITHOUT_ADVANTAGE
from verl_padding.prefix_sharing.engine import engine_incompatibilities
from verl_padding.worker.plan_packer import PATCHED, module_of
from verl_padding.worker.training_workers import answer, training_workers

INCOMPATIBILITIES = "incompatibilities"
"""Name of what workers answer: of each rank a list of (saving, incompatibility)."""
NamedIncompatibilities = Iterator[tuple[str, Incompatibility]]


def find_incompatibilities(savings: Collection[str]) -> Callable[[Any], Any]:
    """For verl's ``execute_with_func_generator``: answers what of its training workers blocks one
    of these savings."""

    def find(worker: Any) -> Any:
        found: list[tuple[str, Incompatibility]] = []
        for role, training_worker in training_workers(worker).items():
            found += _engine_incompatibilities(training_worker.engine, savings)
            if role == "actor":
                found += _loss_incompatibilities(training_worker.loss_fn, savings)
                if OLD_LOG_PROBS in savings:
                    found += _noise_incompatibilities(training_worker.engine.module)
        return answer(**{INCOMPATIBILITIES: found})

    return find


def _engine_incompatibilities(engine: Any, savings: Collection[str]) -> NamedIncompatibilities:
    if PACKER in savings and PATCHED not in module_of(engine.stock):
        why = "it does not cut micro-batches as verl's engines do"
        fix = "Set padding.packer=verl."
        yield PACKER, Incompatibility(f"engine={engine.stock.__name__}", why, fix)
    if SHARING in savings:
        yield from (
            (SHARING, incompatibility) for incompatibility in engine_incompatibilities(engine)
        )


def _loss_incompatibilities(loss: Any, savings: Collection[str]) -> NamedIncompatibilities:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.utils.losses import ppo_loss

    mode = None
    if isinstance(loss, partial) and loss.func is ppo_loss and "config" in loss.keywords:
        # What it calls may be another one by now, or the user's own under a name of verl's.
        mode = loss.keywords["config"].policy_loss.loss_mode
        loss = get_policy_loss_fn(mode)
        mode = mode if loss.__module__.startswith("verl.") else None
    admitting = {
        ZERO_ADVANTAGE_ROWS: ZERO_WITHOUT_ADVANTAGE,
        OLD_LOG_PROBS: POLICY_LOSSES,
    }
    for saving, admitted in admitting.items():
        if saving in savings and mode not in admitted:
            why = "it may depend on the rows or log-probs that are skipped"
            fix = f"Use one of verl's: {', '.join(admitted)}."
            yield saving, Incompatibility(f"the actor's loss={mode or loss!r}", why, fix)


def _noise_incompatibilities(modules: Any) -> NamedIncompatibilities:
    """What of a model, or of the parts of one, draws something while it trains."""
    for part in modules if isinstance(modules, list | tuple) else [modules]:
        for name, module in part.named_modules():
            is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
            for key, rate in vars(module).items():
                is_rate = "drop" in key or "jitter" in key or (is_dropout and key == "p")
                if is_rate and isinstance(rate, float) and rate > 0:
                    why = "the actor is random in training, so a pass has other log-probs"
                    setting = f"{name}.{key}={rate}"
                    yield OLD_LOG_PROBS, Incompatibility(setting, why, "Set it to 0.")
                    return
