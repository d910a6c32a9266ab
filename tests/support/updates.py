"""The same rows through two padded ranks and through one rank that never sees a pad.

The reference has no pads and no layout: one FSDP2 rank, verl's own loss, the real rows of each
mini-batch in one call, and in one micro-batch, with their number as ``global_batch_size``. Both
sides start from the same weights and take the same AdamW steps.
"""

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_from_nested

from tests.support.fsdp2_workers import start_over, weights_of
from tests.support.padded_group import padded_group
from tests.support.padded_rows import upsample
from tests.support.plan_oracles import reporting_ranks
from tests.support.rows_in_queue import PARTITION, read_columns
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_METRIC
from tests.support.trained_batches import (
    put_branching_rows,
    put_few_rows,
    put_trained_rows,
)
from verl_padding.job.calls import CALLS
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.upsampling import strip
from verl_padding.plan import BatchPlan, Job, Layout, Pass, Rows, Update, plan_batch
from verl_padding.prefix_sharing.detection import PrefixDetection
from verl_padding.worker.losses import MICRO_BATCHES

EPOCHS = 2
PAD_TOKENS = 2  # what engines ask for that round no row up
TEMPLATE = PadTemplate(eos_token_id=3, length=PAD_TOKENS)
CUTS = {
    "budget, verl": {"packer": "verl"},
    "budget, plan": {"packer": "plan"},
    "two rows": {"packer": "plan", "micro_batch_rows": 2},
    "pads alone": {"packer": "plan", "few": True},
    "tries": {"packer": "plan", "sharing": "on"},
}
"""Arguments of :func:`assert_updates_agree`: micro-batches by a token budget or a number of rows,
whoever cuts them; batches of which all ranks but one get pads alone; and prefixes that are computed
once."""
BUDGET = 32


def read_log_probs(batch):
    """Of the responses, as verl's trainer cuts them out of what a pass has written."""
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=PARTITION, select_fields=["log_probs", "response_mask"]
    )
    return [*response_from_nested(data["log_probs"], data["response_mask"]).unbind()]


def call(batch, keys, **extra_info):
    """A worker call for some rows of the batch, with what verl's trainer says to every update."""
    tags = dict(zip(batch.keys, batch.tags, strict=True))
    common = {
        "temperature": 1.0,
        "calculate_entropy": True,
        "distillation_use_topk": False,
        "distillation_only": False,
        "seed": 1,
        "dataloader_kwargs": {"shuffle": False},
    }
    return KVBatchMeta(
        keys=keys,
        tags=[tags[key] for key in keys],
        partition_id=PARTITION,
        fields=batch.fields,
        extra_info=common | extra_info,
    )


def plan_of(
    batch,
    packer,
    *,
    update="actor",
    strategy="prompt",
    sharing="off",
    few=False,
    micro_batch_rows=None,
    ranks_of_row=1,
    pad_tokens=PAD_TOKENS,
    zero_advantage=(),
    mini_batch=None,
    **shape,
):
    """Three mini-batches; and, by a token budget, a pass that is cut as they are.

    Args:
        few: for :func:`put_few_rows`: in two of the mini-batches, one rank (or group of them) alone
            has a real row.
        zero_advantage: rows that the update leaves out.
        mini_batch: prompts of a mini-batch, where they are not cut into three.
        ranks_of_row: how many ranks share a row, and their budgets.
        shape: of the calls, other than two ranks'.
    """
    by_tokens = micro_batch_rows is None
    size = (
        {"token_budget": BUDGET * ranks_of_row}
        if by_tokens
        else {"micro_batch_rows": micro_batch_rows}
    )
    shared = {"dp_size": 2} | size | shape
    prompts = mini_batch or (1 if few else 2)
    job = Job(
        strategy=strategy,
        prompts=3 if few else 6,
        sessions_per_prompt=2,
        updates={
            update: Update(
                **shared, prompts_per_mini_batch=prompts, drops_zero_advantage=bool(zero_advantage)
            )
        },
        inference={"log_prob": Pass(**shared, as_update=update)} if by_tokens and not few else {},
        packer=packer,
        sharing=sharing,
        pad_tokens=pad_tokens,
    )
    tokens_R = [tag["seq_len"] for tag in batch.tags]
    tries = PrefixDetection(batch).by_outputs
    plan = plan_batch(Rows.from_keys(batch.keys, tokens_R, tries, zero_advantage), job)
    layout = plan.layouts[update]
    assert layout.n_pads > 0 or shared["dp_size"] == 1, (
        "one rank needs none beside its token budget"
    )
    assert layout.n_mini_batches == (3 if mini_batch is None else 1) or strategy != "prompt"
    if sharing == "on":
        assert plan.figures[update].sharing_factor > (1.2 if zero_advantage else 1.45)
    assert not few or reporting_ranks(layout)[:2] == [1, 1], (
        "all ranks but one were meant to hold pads alone"
    )
    return plan


METHODS = {call.name: call.method for call in CALLS if call.trains}


@dataclass(frozen=True)
class BothUpdates:
    layout: Layout
    plan: BatchPlan
    padded: dict  # metrics of the padded update, as verl's workers answer
    plain: list[dict]  # metrics of each optimizer step of the reference


def assert_updates_agree(
    padded_ranks,
    one_rank,
    packer="verl",
    *,
    mode=None,
    policy_loss="vanilla",
    update="actor",
    few=False,
    micro_batch_rows=None,
    sharing="off",
    put=None,
    template=TEMPLATE,
    **planned,
):
    """Trains both on the same rows from the same start, and asserts that they end with the same
    weights and metrics.

    Args:
        mode: None for one that divides by rows where micro-batches are cut by rows, and by tokens
            otherwise.
        put: puts the rows; None for those that the plan is made for.
        planned: what else :func:`plan_of` takes.
    """
    if mode is None:
        by_rows = micro_batch_rows is not None or (few and update == "actor")
        mode = (
            ("seq-mean-token-mean" if update == "actor" else "seq-mean-token-sum")
            if by_rows
            else "token-mean"
        )
    start_over([one_rank], mode, policy_loss=policy_loss)
    start_over([padded_ranks], mode, micro_batch_rows, policy_loss)
    rows = put_trained_rows if sharing == "off" else put_branching_rows
    batch = (put or (put_few_rows if few else rows))()
    cut = {"few": few, "micro_batch_rows": micro_batch_rows, "sharing": sharing}
    plan = plan_of(batch, packer, update=update, pad_tokens=template.length, **cut, **planned)
    both = update_both(padded_ranks, one_rank, batch, plan, update=update, template=template)
    assert_metrics_agree(both, update)
    if micro_batch_rows is not None:
        levels_M = [rows // micro_batch_rows for rows in both.layout.local_batch_rows_M]
        assert both.padded[MICRO_BATCHES] == levels_M * EPOCHS
    elif packer == "plan":  # verl's own packer cuts as it likes
        assert_packed_as_planned(both)
    return both


def update_both(
    padded_ranks,
    one_rank,
    batch,
    plan,
    *,
    template=TEMPLATE,
    update="actor",
    said=MappingProxyType({}),
    padded=None,
    copies=None,
):
    """Trains both on the same rows, and asserts that they end with the same weights.

    Args:
        said: goes to the workers with each call.
        padded: the batch with its pads in the queue, where a call has had them before.
        copies: the rows that the one rank trains instead of the batch's, and which of them each row
            is.
    """
    layout, method = plan.layouts[update], METHODS[update]
    before = weights_of(padded_ranks)
    assert torch.equal(before, weights_of(one_rank))

    padded = padded or upsample(batch, plan, template)
    counted = []
    group = padded_group(padded_ranks, padded, lambda call, tokens, epochs: counted.append(tokens))
    # 7 is what a configuration would say, and wrong for every mini-batch here.
    got = _metrics(
        getattr(group, method)(
            call(batch, batch.keys, global_batch_size=7, mini_batch_size=4, epochs=EPOCHS, **said)
        )
    )
    strip(padded.pads)
    assert len(got["lr"]) == 1, "the scheduler takes its step after the last mini-batch"
    computed = plan.figures[update].computed_tokens + layout.n_pads * padded.pad_length
    assert counted == [EPOCHS * computed]
    plain, keys_of = copies or (batch, {key: [key] for key in batch.keys})
    want = []
    for _ in range(EPOCHS):
        for rows in layout.rows_M:
            keys = [key for row in rows for key in keys_of[batch.keys[row]]]
            alone = call(
                plain,
                keys,
                global_batch_size=_rows_with_loss(plain, keys),
                mini_batch_size=len(keys),
                epochs=1,
                **said,
            )
            want.append(_metrics(getattr(one_rank, method)(alone)))

    after, reference = weights_of(padded_ranks), weights_of(one_rank)
    assert (reference - before).norm() > 0.1, "the update was meant to move the weights"
    difference = float((after - reference).norm() / reference.norm())
    assert difference <= RELATIVE_FLOAT32, f"weights differ by {difference:.2g} of their norm"
    return BothUpdates(layout, plan, got, want)


def _rows_with_loss(batch, keys):
    """What a loss divides by: rows that have a token with a loss; 1 where none has."""
    mask_of = dict(zip(batch.keys, read_columns(batch, "loss_mask")[0], strict=True))
    return max(1, sum(bool(mask_of[key].any()) for key in keys))


METRICS = {
    "actor": (
        "actor/pg_loss",
        "kl_loss",
        "actor/entropy_loss",
        "grad_norm",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
    ),
    "critic": ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "grad_norm"),
}


def assert_metrics_agree(both, update="actor", names=None):
    for name in METRICS[update] if names is None else names:
        plain = [np.ravel(step[name])[0] for step in both.plain]
        np.testing.assert_allclose(
            both.padded[name], plain, rtol=RELATIVE_METRIC, atol=5e-7, err_msg=name
        )
    if update == "critic":
        assert max(np.ravel(step["critic/vf_clipfrac"])[0] for step in both.plain) > 0


def assert_packed_as_planned(both):
    """The workers have computed as many micro-batches as the plan says."""
    planned = [len(rows_DK[0]) for rows_DK in both.layout.rows_MDK]
    assert both.padded[MICRO_BATCHES] == planned * EPOCHS


def _metrics(answer):
    # The critic's workers answer with a future.
    return (answer.get() if hasattr(answer, "futures") else answer)["metrics"]
