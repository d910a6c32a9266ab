"""What a worker must be before it gets a row: one with padded engines, of which none learns from
pads beside the loss, and whose losses are scaled by what a mini-batch says of itself. And what of
it blocks a saving: a loss not verl's, a model that draws in training, an engine that cuts or
computes rows in its own way.

verl's losses read the rows, the trained tokens and the ranks of a mini-batch by name, and take
those of the micro-batch where they find none. So if a later verl renames one, jobs go on with other
gradients. Each loss gets two rows by themselves, and again as a part of twice the rows and tokens,
where it must be half, and on three times the ranks, where it must be three times as much, since
FSDP takes the mean over ranks.
"""

import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss, value_loss

from verl_padding.errors import Incompatibility, PaddingConfigError, PaddingError
from verl_padding.job.savings import OLD_LOG_PROBS, PACKER, SHARING, ZERO_ADVANTAGE_ROWS
from verl_padding.job.vendor import FOR_WORKERS, VARIABLE, VENDOR
from verl_padding.job.verl_losses import POLICY_LOSSES, ZERO_WITHOUT_ADVANTAGE
from verl_padding.prefix_sharing.engine import engine_incompatibilities
from verl_padding.worker.losses import normalize_over_mini_batch
from verl_padding.worker.padded_engine import PaddedEngine
from verl_padding.worker.plan_packer import PATCHED, module_of
from verl_padding.worker.training_workers import answer, training_workers, worker_data

INCOMPATIBILITIES = "incompatibilities"
"""Name of what workers answer: of each rank a list of (saving, incompatibility)."""
NamedIncompatibilities = Iterator[tuple[str, Incompatibility]]
ALONE = {"dp_size": 1, "global_batch_size": 2, "batch_num_tokens": 5}
"""Ranks, rows and trained tokens of a mini-batch that is two responses of 2 and 3 tokens."""
HALF = {"global_batch_size": 4, "batch_num_tokens": 10}
THRICE = {"dp_size": 3}


def check_in_worker(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``: refuses engines and losses that no plan reaches,
    or in which pads count.

    Raises:
        PaddingConfigError: an engine is not a padded one, or has such a setting.
        PaddingError: a loss of verl's reads other names.
    """
    for role, training_worker in training_workers(worker).items():
        check_is_padded(training_worker.engine)
        check_megatron(role, training_worker)
        check_loss_scaling(role, training_worker.loss_fn)
    return answer()


def check_is_padded(engine: Any) -> None:
    """Refuses an engine that would train on pads: one that a user has registered, or verl's own in
    workers that do not have the variable."""
    if isinstance(engine, PaddedEngine):
        return
    why = f"{type(engine).__name__} follows no plan"
    vendor = os.environ.get(VARIABLE)
    if vendor != VENDOR:
        fix = f"Set {VARIABLE}={VENDOR} in the runtime environment of the Ray job that you start"
        raise PaddingConfigError(f"{VARIABLE}={vendor}: {why}. {fix}, or +{FOR_WORKERS}={VENDOR}.")
    fix = "Call verl_padding.worker.padded_engine.register_padded_engines() after its module"
    raise PaddingConfigError(f"strategy={engine.engine_config.strategy}: {why}. {fix}.")


def check_megatron(role: str, training_worker: Any) -> None:
    """Refuses what Megatron would compute of all tokens, those of pads too: places at experts, in
    passes as well, of which the first come get theirs, and losses beside that of the role."""
    if (config := getattr(training_worker.engine, "tf_config", None)) is None:
        return
    counts = {"moe_expert_capacity_factor": (config.moe_expert_capacity_factor or -1) > 0}
    if role != "ref":
        kinds, has_loss = config.moe_router_load_balancing_type, np.any(config.moe_aux_loss_coeff)
        counts["moe_router_load_balancing_type"] = "sinkhorn" in kinds or (
            has_loss and kinds not in ("none", ["none"])
        )
        counts["moe_z_loss_coeff"] = config.moe_z_loss_coeff
        rate = config.moe_router_bias_update_rate
        counts["moe_router_bias_update_rate"] = config.moe_router_enable_expert_bias and rate
        trains_mtp = training_worker.model_config.mtp.enable_train
        counts["mtp_num_layers"] = trains_mtp and config.mtp_num_layers
    if name := next(filter(counts.get, counts), None):
        raise PaddingConfigError(
            f"override_transformer_config.{name}={getattr(config, name)}: in the {role} model, it "
            "counts the tokens of pads. Turn it off (a rate is 0, mtp.enable_train=False)."
        )


def check_loss_scaling(role: str, loss: Any) -> None:
    """Refuses one of verl's own losses that is not scaled by its mini-batch; lets any other pass.

    Raises:
        PaddingError: with what the loss does not read.
    """
    if not isinstance(loss, partial) or loss.func not in (ppo_loss, value_loss):
        return
    # As padded jobs have it: a mean of rows as their share of the mini-batch's.
    inner = normalize_over_mini_batch(loss)
    alone = _value(inner, ALONE)
    checks = [(THRICE, 3.0)]
    if loss.keywords["config"].loss_agg_mode != "token-sum":  # which is divided by nothing
        checks.append((HALF, 0.5))
    for changed, factor in checks:
        value, expected = _value(inner, ALONE | changed), factor * alone
        # A loss of a user's that is NaN is so whatever it reads: the first step's metrics show it.
        if not torch.isclose(value, expected, rtol=1e-5, equal_nan=True):
            names = ", ".join(f"{name}={number}" for name, number in changed.items())
            raise PaddingError(
                f"the {role}'s loss={loss.func.__name__}: with {names} it is {value:.6g}, not "
                f"{expected:.6g}. Train with verl 0.9.1, or without +padding."
            )


def _value(loss: Callable[..., Any], mini_batch: dict[str, int]) -> torch.Tensor:
    fields = {
        "response_mask": [1, 1, 1, 1, 1],
        "advantages": [1, 2, -1, 3, 4],
        "old_log_probs": [-1] * 5,
        "ref_log_prob": [-0.9] * 5,
        "values": [0] * 5,
        "returns": [1] * 5,
    }
    ids = [torch.arange(3), torch.arange(4)]
    data = worker_data(
        ids,
        **{
            name: torch.tensor(value_T, dtype=torch.float64).split((2, 3))
            for name, value_T in fields.items()
        },
    )
    tu.assign_non_tensor(data, **mini_batch)
    outputs = tu.nested_tensor_from_tensor_list([torch.full((len(row),), -0.9) for row in ids])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)  # some losses draw tokens
        value, _ = loss(model_output={"log_probs": outputs, "values": outputs}, data=data)
    return value.double()


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
                    why = "the actor is stochastic in training, so a pass's log-probs differ"
                    setting = f"{name}.{key}={rate}"
                    yield OLD_LOG_PROBS, Incompatibility(setting, why, "Set it to 0.")
                    return
