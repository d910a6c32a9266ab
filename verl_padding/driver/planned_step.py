"""Plan and pads of a local update, until it has ended."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from verl.utils.profiler import simple_timer

from verl_padding.driver.step_metrics import (
    CallTokens,
    layout_of_ranks,
    plan_metrics,
    rank_token_metrics,
    saved_metrics,
)
from verl_padding.driver.zero_advantage_rows import find_zero_advantage_rows
from verl_padding.job import metric_names as names
from verl_padding.job.blocker import refuse
from verl_padding.job.calls import ACTOR, CALL_BY_NAME, LOG_PROB
from verl_padding.job.verl_job import VerlJob
from verl_padding.pads.padded_batch import PaddedBatch, strip_after_an_error
from verl_padding.pads.queue import KVBatchMeta
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.pads.upsampling import strip
from verl_padding.plan import BatchPlan
from verl_padding.prefix_sharing.detection import PrefixDetection
from verl_padding.record.timings import MicroBatchTiming


@dataclass(frozen=True)
class UpdateNumber:
    """Which local update of a job it is."""

    global_step: int
    local_update: int
    """From 0 in each global step."""

    def seed(self, configured: int) -> int:
        """A seed for the planner that differs in each local update, and is the same in a resumed
        run."""
        parts = [configured, self.global_step, self.local_update]
        return int(np.random.SeedSequence(parts).generate_state(1)[0])


class Planner(Protocol):
    """What a step asks of what has planned it (``step_planner.py``)."""

    job: VerlJob

    def pad(
        self,
        batch: KVBatchMeta,
        number: UpdateNumber,
        prefixes: PrefixDetection,
        calls: Collection[str] | None,
        left_out: Sequence[int] = (),
    ) -> PaddedBatch: ...

    def log_once(self, message: str, about: str = "") -> None: ...


class PlannedStep:
    """The real rows of a local update, and what its worker calls are sent: planned, with pads in
    TransferQueue.

    Pads are there from :meth:`put_pads` to :meth:`close`.
    """

    def __init__(
        self,
        planner: Planner,
        padded: PaddedBatch,
        number: UpdateNumber,
        prefixes: PrefixDetection,
        calls: Collection[str] | None,
        *,
        repeated_tokens: int | None,
        seconds: dict[str, float],
    ):
        self._planner, self._padded, self._calls = planner, padded, calls
        self.number, self.prefixes = number, prefixes
        self.batch = padded.batch
        """The real rows, as they were planned."""
        self._plans = [padded]
        """Beside the first, the actor's update each time that it was planned anew for the rows that
        it leaves out; the last one counts, and the pads of all are taken out in the end."""
        self._left_out: list[int] = []
        """The rows that the actor's update left out when it was called last."""
        self.has_updated = False
        """Whether an update of the actor has taken its own log-probs for the old policy's."""
        self.timings: list[MicroBatchTiming] = []
        """What its micro-batches took; empty where they are not timed."""
        self.repeated_tokens = repeated_tokens
        """Tokens that an earlier row trains, where they are masked."""
        self.seconds = seconds
        """Metric -> seconds that planning and its parts took."""
        self.tokens: dict[str, CallTokens] = {}
        """Of each call that was made, for rows of the step."""

    @property
    def pads(self) -> list[KVBatchMeta]:
        """The pads of each of its plans."""
        return [padded.pads for padded in self._plans]

    @property
    def counted_pad_tags(self) -> list[dict[str, Any]]:
        """Tags of the pads that ``global_seqlen/*`` counts: by the plan of all rows."""
        layout = layout_of_ranks(self._padded.plan)
        return list(self._padded.pads.tags[: layout.n_pads if layout else 0])

    @property
    def plan(self) -> BatchPlan:
        """The plan of all calls, as they were made or will be."""
        plan, update = self._padded.plan, self._plans[-1].plan
        return replace(
            plan,
            layouts={**plan.layouts, **update.layouts},
            figures={**plan.figures, **update.figures},
        )

    def put_pads(self) -> None:
        """Puts the pads into TransferQueue."""
        with simple_timer(names.UPSAMPLE_SECONDS, self.seconds):
            self._plans[-1].put_pads()

    def has_planned(self, call: str, batch: KVBatchMeta) -> bool:
        """Whether a worker call with these rows, in any order, is one of the step's."""
        return call in self._padded.plan.layouts and sorted(batch.keys) == sorted(self.batch.keys)

    def padded_for(self, call: str) -> PaddedBatch:
        """What a worker call is sent.

        An update that leaves out rows without an advantage is planned again when it is called: now
        advantages are known. Until then the plan holds all rows, so that what cannot be planned was
        refused before any pass.
        """
        job = self._planner.job
        if call == ACTOR and job.leaves_out_old_log_probs and not self._padded.has_old_log_probs():
            if self.has_updated:
                refuse(
                    f"padding.recompute_old_log_probs={job.padding.recompute_old_log_probs}",
                    "the actor is updated more than once in a step, or on some of its rows, and "
                    "later updates compare with log-probs from before the first",
                    "Set it to True.",
                )
            self.has_updated = True
        if call != ACTOR or not job.skips_zero_advantage_rows:
            return self._padded
        left_out = find_zero_advantage_rows(self.batch)
        # An update may be called twice, and a trainer of one's own may change advantages between.
        if left_out != self._left_out:
            with simple_timer(names.PLAN_SECONDS, self.seconds):
                padded = self._planner.pad(
                    self.batch, self.number, self.prefixes, self._calls, left_out
                )
            self._plans.append(padded)
            self._left_out = left_out
            # They are known before they are put: whatever happens, they are taken out again.
            self.put_pads()
        return self._plans[-1]

    def note_work(self, call: str, tokens: int) -> None:
        """Notes the tokens that reached the models in a call, of pads too, and says so in the log
        where the plan has fewer: then it is slower than planned, and takes more memory."""
        padded = self._plans[-1] if call == ACTOR else self._padded
        layout, figures = padded.plan.layouts[call], padded.plan.figures[call]
        epochs, noted = self._planner.job.epochs(call), self.tokens.setdefault(call, CallTokens())
        computed = tokens - epochs * layout.n_pads * padded.pad_length
        noted.computed += computed
        noted.of_rows += epochs * round(figures.computed_tokens * figures.sharing_factor)
        noted.epochs += epochs
        if computed > (planned := epochs * figures.computed_tokens):
            self._planner.log_once(
                f"step {self.number.global_step}: {computed:,} tokens reached the models in worker "
                f"call {call!r}, where the plan has {planned:,}. Metrics of what is saved have the "
                "former.",
                about="computed tokens",
            )

    @property
    def mask_R(self) -> list[torch.Tensor]:
        """Which response tokens of each real row were trained, (response,) each."""
        return self._plans[-1].mask_R

    @property
    def rows_with_loss(self) -> list[int]:
        """Numbers of the real rows that have a token with a loss."""
        return [row for row, tokens in enumerate(self._padded.loss_tokens_R) if tokens]

    @property
    def weight_R(self) -> list[float]:
        """What the gradient of each row's outputs was multiplied by in the actor's update."""
        return self._plans[-1].weights(ACTOR)

    def metrics(self) -> dict[str, float]:
        """What was planned, and under verl's name the tokens that ranks get."""
        lengths = tokens_of_tags(self.batch.keys, self.batch.tags)
        # verl's are of all rows.
        prefix = "global_seqlen_computed" if self._left_out else "global_seqlen"
        found = plan_metrics(self.plan, lengths, self._padded.pad_length) | self.seconds
        if self.repeated_tokens is not None:
            found[names.REPEATED_TOKENS] = self.repeated_tokens
        if self._planner.job.skips_zero_advantage_rows and ACTOR in self.plan.layouts:
            found = {names.LEFT_OUT_ROWS.format(update=ACTOR): 0} | found
        return found | rank_token_metrics(self.plan, lengths, self._padded.pad_length, prefix)

    def final_metrics(self) -> dict[str, float]:
        """The same once the updates were made, with what was computed and left out, and with the
        optimizer steps whose rows have no trained token."""
        job, layouts = self._planner.job, self.plan.layouts
        saved = saved_metrics(
            self.tokens,
            of_all_rows=sum(tokens_of_tags(self.batch.keys, self.batch.tags)),
            has_pass=not job.leaves_out_old_log_probs
            or LOG_PROB in self.tokens
            or ACTOR not in layouts,
        )
        made = {call: self._plans[-1] if call == ACTOR else self._padded for call in layouts}
        idle = {
            names.IDLE_STEPS.format(update=call): padded.idle_steps(call)
            for call, padded in made.items()
            if CALL_BY_NAME[call].trains
        }
        return self.metrics() | saved | idle

    def close(self, *, failed: bool = False) -> None:
        """Takes the pads out; while an error is on its way, a failure to do so is only logged."""
        for padded in self._plans:
            if failed:
                strip_after_an_error(padded)
            else:
                strip(padded.pads)
