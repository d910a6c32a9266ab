"""Plan and pads of a local update, until it has ended."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from verl.utils.profiler import simple_timer

from verl_padding.driver.agent_roles import read_roles
from verl_padding.driver.samples import sample_unit
from verl_padding.driver.step_metrics import (
    CallTokens,
    layout_of_ranks,
    plan_metrics,
    rank_token_metrics,
    saved_metrics,
)
from verl_padding.driver.zero_advantage_rows import find_zero_advantage_rows
from verl_padding.errors import PaddingDataError
from verl_padding.job import metric_names as names
from verl_padding.job.calls import ACTOR, CALL_BY_NAME, LOG_PROB
from verl_padding.job.incompatibility import Incompatibility, refuse
from verl_padding.job.loss_weightings import loss_weighting
from verl_padding.job.savings import OLD_LOG_PROBS
from verl_padding.job.verl_job import VerlJob, translate_plan_error
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.prompt_order import data_order
from verl_padding.pads.queue import KVBatchMeta, first_few
from verl_padding.pads.source_rows import SourceRows
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.upsampling import strip
from verl_padding.plan import BatchPlan, PlanError, Rows, plan_batch
from verl_padding.plan.plural import plural
from verl_padding.prefix_sharing.detection import PrefixDetection
from verl_padding.prefix_sharing.repeated_tokens import mask_repeated_tokens
from verl_padding.record.timings import MicroBatchTiming

logger = logging.getLogger(__name__)

PLAN_SECONDS = "timing_s/padding/plan"


def update_seed(configured: int, step: int, local_update: int) -> int:
    """A seed for the planner that differs in each local update, from 0 in each global step, and is
    the same in a resumed run."""
    return int(np.random.SeedSequence([configured, step, local_update]).generate_state(1)[0])


class PlannedUpdate:
    """The real rows of a local update, and the plan of its worker calls. Pads are in TransferQueue
    from :meth:`put_pads` to :meth:`close`.

    The batch is put in the order of the data set, in place: its rows come in the order in which
    their sessions ended, which no run repeats. A PaddingDataError refuses rows that cannot be
    planned; by then, masks of repeated tokens alone have been changed.

    Args:
        step: the global step.
        seed: of the planner's shuffle.
        template: what pads are made from.
        dp_sizes: data-parallel size of each worker call, as the worker groups have it.
        calls: those that are planned; None for all that the update makes.
    """

    def __init__(
        self,
        job: VerlJob,
        batch: KVBatchMeta,
        *,
        step: int,
        seed: int,
        template: PadTemplate,
        dp_sizes: Mapping[str, int],
        log_once: Callable[..., None],
        calls: Collection[str] | None = None,
    ):
        self._job, self._step, self._seed, self._calls = job, step, seed, calls
        self._template, self._dp_sizes, self._log_once = template, dp_sizes, log_once
        self.seconds: dict[str, float] = {}
        """Metric -> seconds that planning and its parts took."""
        self.repeated_tokens: int | None = None
        """Tokens that an earlier row trains, where they are masked."""
        self._dropped: list[int] = []
        """The rows that the actor's update left out when it was called last."""
        self._has_updated = False  # the actor, with its own log-probs for the old policy's
        self.timings: list[MicroBatchTiming] = []
        """What its micro-batches took; empty where they are not timed."""
        self.tokens: dict[str, CallTokens] = {}
        """Of each call that was made, for rows of the update."""
        with simple_timer(PLAN_SECONDS, self.seconds):
            batch.reorder(data_order(batch.keys))
            self._tokens_R = tokens_of_tags(batch.keys, batch.tags)
            self.prefixes = PrefixDetection(batch, self._tokens_R, may_have_images=job.has_images)
            # TransferQueue raises when it is asked for no row; the planner refuses such a batch.
            if batch.keys and calls is None:
                self._keep_pass_that_rows_need(batch)
                if unit := sample_unit(batch.keys, job.padding):
                    self._log(unit, "rows of sessions")
                if job.padding.repeated_tokens == "once":
                    self.repeated_tokens = mask_repeated_tokens(batch, self.prefixes)
                if self.repeated_tokens:
                    self._log(
                        f"{plural(self.repeated_tokens, 'sampled token')} repeated from earlier "
                        "rows of their sessions, masked because of padding.repeated_tokens=once. "
                        f"{names.REPEATED_TOKENS} counts them.",
                        "repeated tokens",
                    )
            self._padded = self._plan_calls(batch)
        self.batch = self._padded.batch
        """The real rows, as they were planned."""
        self.padded = dict.fromkeys([*self._padded.plan.layouts, ACTOR], self._padded)
        """The plan and pads of each worker call, as it was made last or will be: the actor's update
        is planned anew for the rows that it leaves out."""
        self._plans = [self._padded]  # all that were made, whose pads are taken out in the end

    @cached_property
    def role_R(self) -> list[str]:
        """The role of each row; a PaddingDataError if one has none."""
        return read_roles(self.batch.keys, self.batch.partition_id)

    def check_declared(self) -> None:
        """Refuses rows of which an agent loop has not said what their advantages need."""
        if self._job.padding.advantages == "session":
            _ = self.prefixes.continued_R
        if self._job.padding.baseline == "role":
            _ = self.role_R

    def _log(self, message: str, about: str) -> None:
        self._log_once(f"step {self._step}: {message}", about=about)

    def join(self, update: "PlannedUpdate") -> None:
        """Counts its tokens with those of an update of whose rows some may have been trained."""
        self.tokens, self._has_updated = update.tokens, True

    def _keep_pass_that_rows_need(self, batch: KVBatchMeta) -> None:
        """Keeps the pass for old log-probs, from now on, if a second optimizer step compares with
        them, or verl's trainer something that a row has."""
        if not self._job.skips_old_log_probs:
            return
        incompatibilities, job, name = [], self._job.planner_job(), "rollout_log_probs"
        if (steps := job.steps_of_batch(job.updates[ACTOR], len(batch))) > 1:
            setting = f"padding.optimizer_steps={job.optimizer_steps}"
            why = f"the second of {steps} optimizer steps needs old log-probs"
            incompatibilities.append(Incompatibility(setting, why, "Set it to configured."))
        correction = self._job.config.algorithm.get("rollout_correction")
        if correction is not None and (having := SourceRows(batch).keys_with(name)):
            why = "verl's trainer compares it with old log-probs"
            fix = "Have the agent loop return none, or set algorithm.rollout_correction=null."
            incompatibilities.append(Incompatibility(f"field {name} of {having[0]}", why, fix))
        self._job.savings.block(OLD_LOG_PROBS, incompatibilities)

    def _plan_calls(self, batch: KVBatchMeta, dropped: Sequence[int] = ()) -> PaddedBatch:
        """The plan of the calls, and their pads, which are not put yet.

        With rows ``dropped``, the result is of the actor's update alone, since that leaves them
        out. All calls are planned even so, and the others dropped: ``lcm`` cuts the actor's
        mini-batches by the critic's sizes, too.
        """
        job, step = self._job, self._step
        shape = job.planner_job(
            calls=self._calls,
            dp_sizes=self._dp_sizes,
            updates_actor=job.updates_actor(step),
            seed=self._seed,
            pad_tokens=self._template.length,
        )
        may_branch = tries = None
        if job.shares and batch.keys:
            may_branch = job.may_branch
            if may_branch and self.prefixes.has_images:
                # What sees an image may see more than what is before it, by a mask of the model's.
                may_branch = False
                self._log("full-prefix sharing only in batches whose rows have images", "images")
            tries = self.prefixes.by_outputs
            shape = replace(shape, may_branch=may_branch)
        # Planned before a pad is put: what is refused leaves the queue as it was.
        try:
            plan = plan_batch(Rows.from_keys(batch.keys, self._tokens_R, tries, dropped), shape)
        except PlanError as refusal:
            raise PaddingDataError(f"step {step}: {translate_plan_error(refusal)}") from refusal
        if dropped:
            layouts, figures = {ACTOR: plan.layouts[ACTOR]}, {ACTOR: plan.figures[ACTOR]}
            plan = replace(plan, layouts=layouts, figures=figures, warnings=(), hint=None)
        for warning in plan.warnings:
            logger.warning("verl_padding: step %d: %s", step, warning)
        if plan.hint:
            self._log(translate_plan_error(plan.hint), "hint")
        return PaddedBatch(
            batch,
            plan,
            self._template,
            weighting=loss_weighting(job.config, job.padding),
            may_branch=may_branch,
            # Rows of a single call have other numbers than those of the update.
            timed=job.padding.timing and self._calls is None,
            own_old_log_probs=job.skips_old_log_probs,
            drops_zero_advantage=job.skips_zero_advantage_rows,
        )

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
        plan, update = self._padded.plan, self.padded[ACTOR].plan
        layouts = {**plan.layouts, **update.layouts}
        return replace(plan, layouts=layouts, figures={**plan.figures, **update.figures})

    def put_pads(self) -> None:
        """Puts the pads into TransferQueue."""
        with simple_timer("timing_s/padding/upsample", self.seconds):
            self._plans[-1].put_pads()

    def has_planned(self, call: str, batch: KVBatchMeta) -> bool:
        """Whether a worker call with these rows, in any order, is one of the update's."""
        return call in self._padded.plan.layouts and sorted(batch.keys) == sorted(self.batch.keys)

    def prepare_call(self, call: str) -> PaddedBatch:
        """The plan and pads of a worker call that is about to be made.

        An update that leaves out rows without an advantage is planned again, and its pads are put:
        now advantages are known. Until then the plan holds all rows, so that what cannot be planned
        was refused before any pass.
        """
        job = self._job
        if call == ACTOR and job.skips_old_log_probs and not self._padded.has_old_log_probs():
            if self._has_updated:
                refuse(
                    f"padding.recompute_old_log_probs={job.padding.recompute_old_log_probs}",
                    "the actor is updated more than once in a step, or on part of its rows, and "
                    "later updates compare with log-probs from before the first one",
                    "Set it to True.",
                )
            self._has_updated = True
        if call == ACTOR and job.skips_zero_advantage_rows:
            dropped = find_zero_advantage_rows(self.batch)
            # It may be called twice, and a trainer of one's own may change advantages between.
            if dropped != self._dropped:
                with simple_timer(PLAN_SECONDS, self.seconds):
                    self.padded[ACTOR] = self._plan_calls(self.batch, dropped)
                self._plans.append(self.padded[ACTOR])
                self._dropped = dropped
                # They are known before they are put: whatever happens, they are taken out again.
                self.put_pads()
        return self.padded[call]

    def note_work(self, call: str, tokens: int, epochs: int) -> None:
        """Notes the tokens that reached the models in all epochs of a call, of pads too, and says
        so in the log where the plan has fewer: then it is slower than planned, and takes more
        memory."""
        padded = self.padded[call]
        layout, figures = padded.plan.layouts[call], padded.plan.figures[call]
        noted = self.tokens.setdefault(call, CallTokens())
        computed = tokens - epochs * layout.n_pads * padded.pad_length
        noted.computed += computed
        noted.row_tokens += epochs * round(figures.computed_tokens * figures.sharing_factor)
        noted.all_row_tokens += epochs * sum(self._tokens_R)
        if computed > (planned := epochs * figures.computed_tokens):
            self._log(
                f"{computed:,} tokens reached the models in worker call {call!r}, more than the "
                f"{planned:,} of the plan. Metrics of savings count the former.",
                "computed tokens",
            )

    @property
    def rows_with_loss(self) -> list[int]:
        """Numbers of the real rows that have a token with a loss."""
        return [row for row, tokens in enumerate(self._padded.loss_tokens_R) if tokens]

    def metrics(self) -> dict[str, float]:
        """What was planned, and under verl's name the tokens that ranks get."""
        # verl's are of all rows.
        prefix = "global_seqlen_computed" if self._dropped else "global_seqlen"
        found = plan_metrics(self.plan, self._tokens_R, self._padded.pad_length) | self.seconds
        if self.repeated_tokens is not None:
            found[names.REPEATED_TOKENS] = self.repeated_tokens
        if self._job.skips_zero_advantage_rows and ACTOR in self.plan.layouts:
            found = {names.DROPPED_ROWS.format(update=ACTOR): 0} | found
        return found | rank_token_metrics(
            self.plan, self._tokens_R, self._padded.pad_length, prefix
        )

    def final_metrics(self) -> dict[str, float]:
        """The same once the updates were made, with what was computed and left out, and with the
        optimizer steps whose rows have no trained token."""
        job, layouts = self._job, self.plan.layouts
        saved = saved_metrics(
            self.tokens,
            step_tokens=sum(self._tokens_R),
            has_pass=not job.skips_old_log_probs or LOG_PROB in self.tokens or ACTOR not in layouts,
        )
        idle_steps = {
            f"padding/{call}/idle_steps/total": self.padded[call].idle_steps(call)
            for call in layouts
            if CALL_BY_NAME[call].trains
        }
        return self.metrics() | saved | idle_steps

    def close(self, *, failed: bool = False) -> None:
        """Takes the pads out; while an error is on its way, a failure to do so is only logged."""
        for padded in self._plans:
            try:
                strip(padded.pads)
            except Exception:
                if not failed:
                    raise
                logger.exception(
                    f"verl_padding: {len(padded.pads)} pads ({first_few(padded.pads.keys)}) could "
                    "not be cleared after an error; the next job on this TransferQueue will clear "
                    "them"
                )
