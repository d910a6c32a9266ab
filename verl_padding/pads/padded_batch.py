"""A batch with its plan and its pads: put in, ordered into worker calls, taken out."""

from collections import deque
from collections.abc import Collection, Mapping
from functools import cached_property

import torch
from tensordict import TensorDict

from verl_padding.errors import PaddingDataError
from verl_padding.pads.loss_weighting import (
    ACTOR,
    LOSS_WEIGHT,
    LossWeighting,
    loss_factors,
)
from verl_padding.pads.planned_call import (
    BATCH_ROW,
    CALL,
    COLUMN_DTYPES,
    IS_PADDING,
    MiniBatch,
    PlannedCall,
    cut_into,
    mini_batches,
)
from verl_padding.pads.queue import (
    EXTRA_FIELDS,
    KVBatchMeta,
    fields_of_all,
    put_columns,
    put_new_rows,
    read_fields,
    rows_like,
    select_rows,
    tokens_of_masks,
)
from verl_padding.pads.source_rows import SourceRows
from verl_padding.pads.template import Columns, PadTemplate
from verl_padding.pads.upsampling import new_pads
from verl_padding.plan import BatchPlan

NO_ADAPTER, LOG_PROB = "no_lora_adapter", "log_prob"
"""verl's key in ``extra_info`` of a pass of a LoRA actor as its own reference, and the pass."""


class PaddedBatch:
    """A batch of real rows, its plan, and the pads that wait in TransferQueue for the worker calls.

    The trainer keeps the real rows; a worker call gets the rows of its layout, real ones and pads,
    in the order in which verl assigns them to ranks. :meth:`put_pads` puts the pads,
    :func:`~verl_padding.pads.queue.clear` of their keys takes them out.

    A PaddingDataError refuses a real row that :class:`SourceRows` refuses, or that cannot weigh
    what its agent loop says.

    Args:
        weighting: how the actor's loss weighs rows.
        own_old_log_probs: whether the actor's update takes its own log-probs for those of the old
            policy.
    """

    def __init__(
        self,
        batch: KVBatchMeta,
        plan: BatchPlan,
        template: PadTemplate,
        *,
        weighting: LossWeighting,
        own_old_log_probs: bool = False,
    ):
        # The trainer may reorder its batch in place, and the plan knows rows by their numbers.
        self.batch = rows_like(batch, batch.keys, batch.tags)
        """The real rows as they were planned."""
        self.plan = plan
        self.pads = new_pads(self.batch, 0, template)
        """Those that have been put, or are about to be."""
        self.pad_length = template.length
        self._template = template
        self._weighting, self._own_old_log_probs = weighting, own_old_log_probs
        self._source = SourceRows(self.batch)
        self._fields_put: set[str] = set()
        self._factor_R = self._loss_factors()

    def _loss_factors(self) -> list[float] | None:
        """Of each real row in the actor's update; None where all weigh the same."""
        weight_R, weighting = self._source.weights(), self._weighting
        if not self._source.keys_with(LOSS_WEIGHT) and not weighting.by_session:
            return None
        # Also where the actor does not train, as while its critic warms up.
        if weighting.refusal and set(weight_R) != {1.0}:
            raise PaddingDataError(
                f"field {LOSS_WEIGHT!r}: no loss of this job can weigh its rows: "
                f"{weighting.refusal}"
            )
        if ACTOR not in self.plan.layouts:
            return None
        layout = self.plan.layouts[ACTOR]
        return loss_factors(layout, self.batch.keys, weight_R, self.loss_tokens_R, weighting)

    def put_pads(self) -> None:
        """Puts the pads of the plan that are not there yet, with the fields that real rows have by
        now, in one put; none if one of these is refused."""
        n_pads = max(self.plan.n_pads - len(self.pads), 0)
        # One is made even if none is needed: a field that no pad can have is refused when it first
        # appears.
        fields = self._new_fields(n_pads or 1)
        if n_pads:
            pads = new_pads(self.batch, n_pads, self._template)
            self._fields_put = self._fields_put or set(fields)
            # They are known before they are put: whatever happens, they are taken out again.
            self.pads = rows_like(pads, self.pads.keys + pads.keys, self.pads.tags + pads.tags)
            put_new_rows(pads, TensorDict(fields, batch_size=n_pads))

    def has_old_log_probs(self) -> bool:
        """Whether the rows have old log-probs by now, of a pass or of a trainer of one's own."""
        return "old_log_probs" in fields_of_all(self.batch.keys, self.batch.partition_id)

    def weights(self, call: str) -> list[float]:
        """What the gradient of each real row's outputs is multiplied by in an update."""
        if call != ACTOR or self._factor_R is None:
            return [1.0] * len(self.batch)
        return self._factor_R

    def idle_steps(self, call: str) -> int:
        """Optimizer steps of an update, once it was called, none of whose rows has a trained token
        that weighs."""
        rows = enumerate(zip(self.mask_R, self.weights(call), strict=True))
        trained = {row for row, (mask, weight) in rows if weight and mask.any()}
        return sum(trained.isdisjoint(rows) for rows in self.plan.layouts[call].rows_M)

    @cached_property
    def mask_R(self) -> list[torch.Tensor]:
        """Which response tokens of each real row are trained, (response,) each, once the first
        update was called."""
        # Read as late as that: until then the trainer may reject tokens.
        fields = read_fields(self.batch.keys, self.batch.partition_id, ["response_mask"])
        return [mask.bool() for mask in fields["response_mask"].unbind()]

    @cached_property
    def loss_tokens_R(self) -> list[int]:
        """Tokens with a loss of each real row, whatever the trainer has rejected since."""
        # verl counts the tokens of a mini-batch by this mask, which no rejection changes.
        return tokens_of_masks(self.batch, "loss_mask")

    def _mini_batches(self, call: str) -> list[MiniBatch]:
        """Those of an update, whose pads get the fields that the trainer has added since."""
        layout = self.plan.layouts[call]
        if layout.n_pads:
            # TransferQueue hands workers the fields that all rows of a call have, so without this,
            # `advantages` would vanish from every rank that holds a pad.
            pads = select_rows(self.pads, range(layout.n_pads))
            put_columns(pads, self._new_fields(layout.n_pads, self._fields_put))
        return mini_batches(
            layout,
            [int(mask.sum()) for mask in self.mask_R],
            self.loss_tokens_R,
            divides_by_rows=self._weighting.divides_by_rows,
            drops_rows=self.plan.job.updates[call].drops_zero_advantage,
        )

    def worker_batch(self, call: str, batch: KVBatchMeta) -> KVBatchMeta:
        """What workers get in a call: rows in the order of its layout, and what they must know of
        them. Its columns are put into TransferQueue; one marks pads, if a pass has some.

        In an update, a ``batch_sampler`` of the DataLoader with which verl cuts each rank's rows
        replaces ``mini_batch_size`` and ``shuffle`` (``worker/padded_engine.py``): the local
        mini-batches of one mini-batch alone are of one size.
        """
        layout, job = self.plan.layouts[call], self.plan.job
        tries = self.plan.tries if job.sharing == "on" else None
        steps = self._mini_batches(call) if call in job.updates else []
        steps *= batch.extra_info.get("epochs", 1)
        takes_own = call == ACTOR and self._own_old_log_probs and not self.has_old_log_probs()
        assert not takes_own or len(steps) == 1, "a second optimizer step needs old log-probs"
        # The trainer may have reordered its batch, and changed its tags, since it was planned.
        tag_of = dict(zip(batch.keys, batch.tags, strict=True))
        tag_of |= zip(self.pads.keys, self.pads.tags, strict=True)
        planned = [*self.batch.keys, *self.pads.keys]
        ordered = [planned[row] for row in layout.order]
        rows = rows_like(batch, ordered, [tag_of[key] for key in ordered])
        if call != LOG_PROB:
            rows.extra_info.pop(NO_ADAPTER, None)
        rows.extra_info[CALL] = PlannedCall(
            layout=layout,
            may_branch=None if tries is None else job.may_branch,
            position_R=() if tries is None else tries.dfs_position_R.tolist(),
            factor_R=self._factor_R if call == ACTOR else None,
            takes_own_log_probs=takes_own,
            mini_batches=deque(steps),
        )
        columns = {BATCH_ROW: torch.tensor(layout.order)}
        if steps or layout.n_pads:
            columns[IS_PADDING] = columns[BATCH_ROW] >= layout.n_rows
        put_columns(rows, columns)
        if steps:
            rows.extra_info |= cut_into(layout)
            rows.extra_info.pop("mini_batch_size", None)
        return rows

    def _new_fields(self, n_pads: int, leave_out: Collection[str] = ()) -> Columns:
        """Of some pads, what real rows have by now; columns of an earlier call come anew with each
        call."""
        rows = self._source.read()
        for row in rows:
            extra = row.get(EXTRA_FIELDS)
            if isinstance(extra, Mapping) and LOSS_WEIGHT in extra:  # no loss reads it there
                raise PaddingDataError(
                    f"field {EXTRA_FIELDS!r}: {LOSS_WEIGHT}={extra[LOSS_WEIGHT]!r} is in it, but a "
                    f"weight is a field of its own: {LOSS_WEIGHT} of the agent loop's output."
                )
        return self._template.fields(rows, {*COLUMN_DTYPES, *leave_out}, n_pads)
