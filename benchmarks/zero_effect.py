"""What pads do to a training step: stock verl's padding and ours, each against the same rows without pads.

    python -m benchmarks.zero_effect [--keep] [--json]

61 rows of a mini-batch for 120 on two ranks (for estimators 119 as well), in the real TransferQueue, in float64. Stock
verl's pads, order and advantages come from verl's own methods, ours from the padded trainer; both go through verl's
registered losses, in micro-batches of six. The reference is verl's loss on one rank, called once for all real rows,
with their number as the batch size; for losses that choose tokens inside a micro-batch it is the same micro-batches
with the pads taken out. An error is that of the gradient with respect to the model's outputs, the length of the
difference over the length of the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import Any

import torch
import typer

from benchmarks.results import AsJson, Keep, Outcome, report, show, shown, worst
from benchmarks.two_paddings import (
    ALL_BUT_ONE,
    HALF,
    NOMINAL,
    RANKS,
    SIDES,
    Side,
    clear_queue,
    make_trainer,
    pad_as_verl,
    pad_as_we_do,
    put_rows_without_pads,
    read,
)
from tests.support.cluster import ray_and_queue
from tests.support.tolerance import RELATIVE_FLOAT32

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
PACKING_MATTERS = ("clip_cov", "kl_cov")
"""Losses of verl that choose tokens inside a micro-batch."""


def gradient(
    loss: Callable[..., Any], side: Side, data: Any, *, with_pads: bool, output_name: str, at_once: bool = False
) -> torch.Tensor:
    """The gradient of a step with respect to the model's outputs, real rows by key and then pads, (T,) float64."""
    from verl.utils import tensordict_utils as tu

    from tests.support.losses_on_rows import nested

    lengths = [len(p) + len(r) for p, r in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)]
    leaves = {
        key: (
            torch.randn(length, generator=torch.Generator().manual_seed(sum(key.encode()))).double() * 0.3 - 1.0
        ).requires_grad_()
        for key, length in zip(side.keys, lengths, strict=True)
    }
    ranks = 1 if at_once else RANKS
    for rows in side.micro_batches(with_pads=with_pads, at_once=at_once):
        micro = tu.index_select_tensor_dict(data, rows)
        tokens = int(data["loss_mask"].values().sum())
        size = NOMINAL if with_pads else len(side.keys) - sum(side.pads)
        tu.assign_non_tensor(micro, dp_size=ranks, batch_num_tokens=tokens, global_batch_size=size)
        outputs = [leaves[side.keys[row]] for row in rows]
        model_output = {output_name: nested(outputs)}
        if output_name == "log_probs":
            model_output["distillation_losses"] = nested(output * output - output for output in outputs)
            for mass in ("student_mass", "teacher_mass"):
                model_output[mass] = nested(output.detach().exp() for output in outputs)
        # Some losses draw tokens: the same ones whenever they meet the same rows.
        torch.manual_seed(int(micro["returns"].values().nan_to_num().sum().abs() * 1e6) % 2**31)
        value, _ = loss(model_output=model_output, data=micro, dp_group=None)
        (value / ranks).backward()
    in_order = [leaves[key] for _, key in sorted(zip(side.pads, side.keys, strict=True))]
    return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in in_order])


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Pads, at the end of ``got``, should have no gradient."""
    want = torch.cat([want, want.new_zeros(len(got) - len(want))])
    return float((got - want).norm() / want.norm())


def error_of_loss(inner: Callable[..., Any], side: Side, output_name: str, *, at_once: bool) -> Outcome:
    """Error of one loss on one side; the name of the exception if verl raises one because of the pads."""
    from verl_padding.worker.losses import RealRowsLoss

    data = read(side, columns=side.wraps_loss)
    plain = read(side, columns=False)
    want = gradient(inner, side, plain, with_pads=False, output_name=output_name, at_once=at_once)
    loss = RealRowsLoss(inner, "rows") if side.wraps_loss else inner
    try:
        return relative_error(gradient(loss, side, data, with_pads=True, output_name=output_name), want)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__


def registered_losses() -> dict[str, tuple[str, Callable[[str], Callable[..., Any]]]]:
    """Name -> (model output, mode -> loss): verl's policy and distillation losses, and its value loss."""
    from functools import partial

    from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from tests.support.losses_on_rows import critic_loss, distilling_loss, policy_loss
    from verl_padding.worker.losses import PREFIX

    losses: dict[str, tuple[str, Callable[[str], Callable[..., Any]]]] = {}
    for name in sorted(name for name in POLICY_LOSS_REGISTRY if not name.startswith(PREFIX)):
        losses[name] = ("log_probs", partial(policy_loss, name=name))
    for name in sorted(DISTILLATION_LOSS_REGISTRY):
        distilling = partial(distilling_loss, name=name, policy_gradient=name == "k1", task_rewards=False)
        losses[f"distillation {name}"] = ("log_probs", distilling)
    losses["value loss"] = ("values", critic_loss)
    return losses


def estimator_cells(line: dict[str, Any]) -> list[str]:
    if "without pads" in line["59 pads"]:
        return [f"{line['59 pads']['without pads']} without pads too", "", "", ""]
    return [shown(line[pads][side]["gradient"]) for side in SIDES for pads in ("59 pads", "1 pads")]


def measure_losses() -> list[dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for make in (pad_as_verl, pad_as_we_do):
        side = make("grpo", HALF)
        for name, (output_name, loss) in registered_losses().items():
            at_once = name not in PACKING_MATTERS
            errors = {mode: error_of_loss(loss(mode), side, output_name, at_once=at_once) for mode in MODES}
            lines.setdefault(name, {"loss": name})[side.name] = errors
        clear_queue()
    return list(lines.values())


def measure_estimators() -> list[dict[str, Any]]:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    lines = []
    for name in sorted(ADV_ESTIMATOR_REGISTRY):
        line: dict[str, Any] = {"estimator": name}
        for n_rows in (HALF, ALL_BUT_ONE):
            line[f"{NOMINAL - n_rows} pads"] = measure_estimator(name, n_rows)
        lines.append(line)
    return lines


def measure_estimator(name: str, n_rows: int) -> dict[str, Any]:
    from verl.trainer.ppo.v1 import get_trainer_cls

    from tests.support.losses_on_rows import policy_loss
    from verl_padding.worker.losses import RealRowsLoss

    loss = policy_loss("token-mean")
    stock = get_trainer_cls("sync")
    reference = Side("without pads", make_trainer(name), wraps_loss=False)
    try:
        batch = put_rows_without_pads(n_rows)
        reference.keys, reference.pads = list(batch.keys), [False] * n_rows
        torch.manual_seed(0)
        try:
            stock._compute_advantage(reference.trainer, batch, reference.metrics)
        except Exception as error:  # it does not run in verl's v1 trainer at all, pads or not
            return {"without pads": type(error).__name__}
        want = gradient(loss, reference, read(reference, columns=False), with_pads=False, output_name="log_probs")
    finally:
        clear_queue()
    record: dict[str, Any] = {}
    for make, label in zip((pad_as_verl, pad_as_we_do), SIDES, strict=True):
        try:
            side = make(name, n_rows)
            wrapped = RealRowsLoss(loss, "rows") if side.wraps_loss else loss
            data = read(side, columns=side.wraps_loss)
            got = gradient(wrapped, side, data, with_pads=True, output_name="log_probs")
        except Exception as error:  # because of the pads: it ran without them
            record[label] = {"gradient": type(error).__name__}
            continue
        finally:
            clear_queue()
        corrected = {key: value for key, value in reference.metrics.items() if key.startswith("rollout_corr/")}
        record[label] = {
            "gradient": relative_error(got, want),
            "kl_coefficient": abs(side.trainer.kl_ctrl_in_reward.value / reference.trainer.kl_ctrl_in_reward.value - 1),
            # Sums of float32 in another order of the rows are off by their rounding.
            "rollout_corr_metrics_off": sum(
                not isclose(side.metrics[key], value, rel_tol=RELATIVE_FLOAT32) for key, value in corrected.items()
            ),
            "rollout_corr_metrics": len(corrected),
        }
    return record


def main(keep: Keep = False, as_json: AsJson = False) -> None:
    """Measures every loss and estimator that the installed verl registers."""
    with ray_and_queue():
        losses, estimators = measure_losses(), measure_estimators()
    show(
        "gradient of a loss: relative error because of pads",
        ["loss", "stock: token-mean", "seq-mean-token-mean", "worst mode", "ours: worst mode"],
        [
            [
                line["loss"],
                shown(line["stock verl"]["token-mean"]),
                shown(line["stock verl"]["seq-mean-token-mean"]),
                shown(worst(list(line["stock verl"].values()))),
                shown(worst(list(line["verl_padding"].values()))),
            ]
            for line in losses
        ],
    )
    show(
        "gradient through an estimator (vanilla, token-mean): relative error because of pads",
        ["estimator", "stock: 59 pads", "1 pad", "ours: 59 pads", "1 pad"],
        [[line["estimator"], *estimator_cells(line)] for line in estimators],
    )
    many = next(line for line in estimators if line["estimator"] == "grpo")["59 pads"]
    show(
        "beside the gradient, with grpo and 59 pads",
        ["", "stock", "ours"],
        [
            ["coefficient of the adaptive KL controller: error", *[shown(many[s]["kl_coefficient"]) for s in SIDES]],
            [
                f"metrics of the rollout correction that are off, of {many[SIDES[0]]['rollout_corr_metrics']}",
                *[str(many[s]["rollout_corr_metrics_off"]) for s in SIDES],
            ],
        ],
    )
    report({"losses": losses, "estimators": estimators}, benchmark=__file__, keep=keep, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
