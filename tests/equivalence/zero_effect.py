"""What pads do to a training step: stock verl's padding and ours, each against the same rows
without pads.

    python -m tests.equivalence.zero_effect [--keep]

61 rows of a mini-batch for 120 on two ranks (for estimators 119 as well), in the real
TransferQueue, in float64. Stock verl's pads, order and advantages come from verl's own methods,
ours from the padded trainer; both go through verl's registered losses, in micro-batches of six. The
reference is verl's loss on one rank, called once for all real rows, with their number as the batch
size; for losses that choose tokens inside a micro-batch it is the same micro-batches with the pads
taken out. An error is that of the gradient with respect to the model's outputs, the length of the
difference over the length of the reference.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transfer_queue as tq
import typer
from tensordict import TensorDict
from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdaptiveKLController
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils import tensordict_utils as tu

from benchmarks.one_gpu.rows import nested
from benchmarks.ray_and_queue import ray_and_queue
from benchmarks.results import Keep, report
from tests.support.loss_comparisons import PACKING_MATTERS, POLICY_LOSSES
from tests.support.losses_on_rows import MODES, critic_loss, distilling_loss, policy_loss
from tests.support.rows_in_queue import PARTITION, empty_queue, put_rows
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.pads.planned_call import CALL, COLUMN_DTYPES, MINI_BATCH, PlannedCall
from verl_padding.worker.losses import RealRowsLoss

PROMPTS, SESSIONS, MICRO, RANKS = 30, 4, 6, 2
NOMINAL = PROMPTS * SESSIONS
HALF, ALL_BUT_ONE = 61, NOMINAL - 1
COMPUTED = ("old_log_probs", "ref_log_prob", "values")
SIDES = ("stock verl", "verl_padding")


@dataclass
class Side:
    """One way of padding, and the same rows in the same micro-batches without pads."""

    name: str
    trainer: Any
    call: PlannedCall | None = None
    """What the update says of its rows, whose loss is wrapped then."""
    keys: list[str] = field(default_factory=list)
    """Rows in the order in which ranks and micro-batches get them."""
    pads: list[bool] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def micro_batches(self, *, with_pads, at_once=False):
        """Row numbers of each micro-batch, rank after rank; without pads all in one if that is
        asked for."""
        if at_once:
            return [[row for row, pad in enumerate(self.pads) if not pad]]
        cut = [
            [*range(len(self.keys))][start : start + MICRO]
            for start in range(0, len(self.keys), MICRO)
        ]
        if with_pads:
            return cut
        return [rows for micro in cut if (rows := [row for row in micro if not self.pads[row]])]


def put_rows_without_pads(n_rows):
    """Rows as they are before an advantage is computed, of 30 prompts with two to four sessions
    each."""
    draw = torch.Generator().manual_seed(0)
    keys = [f"p{row % PROMPTS}_{row // PROMPTS}_0" for row in range(n_rows)]
    lengths = [
        (int(torch.randint(2, 9, (), generator=draw)), 1 + row * 7 % 13) for row in range(n_rows)
    ]
    teacher = [torch.randn(sum(length), 1, generator=draw).double() - 2 for length in lengths]
    torch.manual_seed(0)  # put_rows draws the rest, and both sides must get the same
    batch = put_rows(lengths, keys, teacher_logprobs=teacher)
    put_computed(batch.keys, [response for _, response in lengths], draw)
    return batch


def put_computed(keys, responses, draw):
    """Puts what the workers compute of rows before an advantage."""
    columns = {
        name: nested(
            [torch.randn(length, generator=draw).double() * 0.3 - 1.0 for length in responses]
        )
        for name in COMPUTED
    }
    tq.kv_batch_put(
        keys=keys, partition_id=PARTITION, fields=TensorDict(columns, batch_size=len(keys))
    )


def make_trainer(estimator):
    """A padded trainer without workers; verl's own methods are its base's."""
    trainer = padded_trainer(
        f"algorithm.adv_estimator={estimator}",
        "critic.use_dynamic_bsz=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.rollout_correction.rollout_is=token",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={SESSIONS}",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={MICRO}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={MICRO}",
        *([f"critic.ppo_mini_batch_size={PROMPTS}"] if estimator == "gae" else []),
        dp_size=RANKS,
    )
    trainer.kl_ctrl_in_reward = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=1000)
    return trainer


def pad_as_verl(estimator, n_rows):
    """Stock verl's pads and order, advantages of its padded batch; raises whatever verl's estimator
    raises on it."""
    stock, side = get_trainer_cls("sync"), Side("stock verl", make_trainer(estimator))
    batch = stock._balance_batch(side.trainer, put_rows_without_pads(n_rows), {})
    side.keys, side.pads = list(batch.keys), [bool(tag.get("is_padding")) for tag in batch.tags]
    pad_keys = [key for key, pad in zip(side.keys, side.pads, strict=True) if pad]
    assert len(pad_keys) == NOMINAL - n_rows
    put_computed(pad_keys, [1] * len(pad_keys), torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    stock._compute_advantage(side.trainer, batch, side.metrics)
    return side


def pad_as_we_do(estimator, n_rows):
    """Our pads and plan, advantages of verl's method in the padded trainer."""
    side = Side("verl_padding", make_trainer(estimator))
    batch = side.trainer._balance_batch(put_rows_without_pads(n_rows), {})
    torch.manual_seed(0)
    batch = side.trainer._compute_advantage(batch, side.metrics)
    update = side.trainer.steps.current
    rows = update.worker_batch("actor", batch)
    side.keys, side.pads = list(rows.keys), [bool(tag.get("is_padding")) for tag in rows.tags]
    side.call = rows.extra_info[CALL]
    assert 0 < sum(side.pads) < len(side.pads) == sum(side.pads) + n_rows
    return side


def without_pads(estimator, n_rows):
    """The rows alone, advantages of verl's method."""
    batch = put_rows_without_pads(n_rows)
    side = Side(
        "without pads", make_trainer(estimator), keys=list(batch.keys), pads=[False] * n_rows
    )
    torch.manual_seed(0)
    get_trainer_cls("sync")._compute_advantage(side.trainer, batch, side.metrics)
    return side


def read(side, *, columns):
    """The rows of a side as a worker gets them, and the columns of ours."""
    data = tq.kv_batch_get(keys=side.keys, partition_id=PARTITION)
    # verl's policy gradient of a distillation cannot read rollout_is_weights, pads or not.
    return data.exclude("rollout_is_weights", *(() if columns else COLUMN_DTYPES))


def gradient(loss, side, data, *, with_pads, output_name="log_probs", at_once=False):
    """The gradient of a step with respect to the model's outputs, real rows by key and then pads,
    (T,) float64."""
    lengths = [
        len(p) + len(r)
        for p, r in zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)
    ]
    leaves = {
        key: (
            torch.randn(length, generator=torch.Generator().manual_seed(sum(key.encode()))).double()
            * 0.3
            - 1.0
        ).requires_grad_()
        for key, length in zip(side.keys, lengths, strict=True)
    }
    ranks = 1 if at_once else RANKS
    for rows in side.micro_batches(with_pads=with_pads, at_once=at_once):
        micro = tu.index_select_tensor_dict(data, rows)
        tokens = int(data["loss_mask"].values().sum())
        size = NOMINAL if with_pads else len(side.keys) - sum(side.pads)
        tu.assign_non_tensor(micro, dp_size=ranks, batch_num_tokens=tokens, global_batch_size=size)
        if side.call is not None and with_pads:
            [step] = side.call.mini_batches
            tu.assign_non_tensor(micro, **{CALL: side.call, MINI_BATCH: step})
        outputs = [leaves[side.keys[row]] for row in rows]
        model_output = {output_name: nested(outputs)}
        if output_name == "log_probs":
            model_output["distillation_losses"] = nested(
                [output * output - output for output in outputs]
            )
            for mass in ("student_mass", "teacher_mass"):
                model_output[mass] = nested([output.detach().exp() for output in outputs])
        # Some losses draw tokens: the same ones whenever they meet the same rows.
        torch.manual_seed(int(micro["returns"].values().nan_to_num().sum().abs() * 1e6) % 2**31)
        value, _ = loss(model_output=model_output, data=micro, dp_group=None)
        (value / ranks).backward()
    in_order = [leaves[key] for _, key in sorted(zip(side.pads, side.keys, strict=True))]
    return torch.cat(
        [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in in_order]
    )


def padded_gradient(loss, side, output_name="log_probs"):
    """That of a side's own pads, by its own loss."""
    wrapped = RealRowsLoss(loss) if side.call else loss
    return gradient(
        wrapped, side, read(side, columns=bool(side.call)), with_pads=True, output_name=output_name
    )


def relative_error(got, want):
    """Pads, at the end of ``got``, should have no gradient."""
    want = torch.cat([want, want.new_zeros(len(got) - len(want))])
    return float((got - want).norm() / want.norm())


def error_of_loss(inner, side, output_name, *, at_once):
    """Error of one loss on one side; the name of the exception if verl raises one because of the
    pads."""
    plain = read(side, columns=False)
    want = gradient(inner, side, plain, with_pads=False, output_name=output_name, at_once=at_once)
    try:
        return relative_error(padded_gradient(inner, side, output_name), want)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__


def registered_losses():
    """Name -> (model output, mode -> loss): verl's policy and distillation losses, and its value
    loss."""
    losses = {name: ("log_probs", partial(policy_loss, name=name)) for name in POLICY_LOSSES}
    for name in sorted(DISTILLATION_LOSS_REGISTRY):
        distilling = partial(
            distilling_loss, name=name, policy_gradient=name == "k1", task_rewards=False
        )
        losses[f"distillation {name}"] = ("log_probs", distilling)
    return losses | {"value loss": ("values", critic_loss)}


def measure_losses():
    lines = {}
    for make in (pad_as_verl, pad_as_we_do):
        side = make("grpo", HALF)
        for name, (output_name, loss) in registered_losses().items():
            at_once = name not in PACKING_MATTERS
            errors = {
                mode: error_of_loss(loss(mode), side, output_name, at_once=at_once)
                for mode in MODES
            }
            lines.setdefault(name, {"loss": name})[side.name] = errors
        empty_queue()
    return list(lines.values())


def measure_estimator(name, n_rows):
    """Errors of each side's gradient."""
    loss = policy_loss("token-mean")
    try:
        reference = without_pads(name, n_rows)
        want = gradient(loss, reference, read(reference, columns=False), with_pads=False)
    except Exception as error:  # it does not run in verl's v1 trainer at all, pads or not
        return {"without pads": type(error).__name__}
    finally:
        empty_queue()
    record = {}
    for make, label in zip((pad_as_verl, pad_as_we_do), SIDES, strict=True):
        try:
            side = make(name, n_rows)
            got = padded_gradient(loss, side)
        except Exception as error:  # because of the pads: it ran without them
            record[label] = {"gradient": type(error).__name__}
            continue
        finally:
            empty_queue()
        record[label] = {"gradient": relative_error(got, want)}
    return record


def main(keep: Keep = False) -> None:
    """Measures every loss and estimator that the installed verl registers."""
    with ray_and_queue():
        losses = measure_losses()
        estimators = [
            {"estimator": name}
            | {
                f"{NOMINAL - n_rows} pads": measure_estimator(name, n_rows)
                for n_rows in (HALF, ALL_BUT_ONE)
            }
            for name in sorted(ADV_ESTIMATOR_REGISTRY)
        ]
    report("zero_effect", {"losses": losses, "estimators": estimators}, keep=keep)


if __name__ == "__main__":
    typer.run(main)
