"""Plan and pads of a local update, until it has ended."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from verl.utils.profiler import simple_timer

from verl_padding.driver.agent_roles import read_roles
from verl_padding.driver.step_metrics import (
    FIELDS,
    TrainedRows,
    plan_metrics,
    rank_token_metrics,
)
from verl_padding.errors import Incompatibility, PaddingDataError, refuse
from verl_padding.job import metric_names as names
from verl_padding.job.calls import ACTOR, CALL_BY_NAME, LOG_PROB
from verl_padding.job.loss_weightings import loss_weighting
from verl_padding.job.savings import OLD_LOG_PROBS
from verl_padding.job.verl_job import VerlJob
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.queue import KVBatchMeta, read_fields
from verl_padding.pads.source_rows import SourceRows
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.pads.template import PadTemplate
from verl_padding.plan import BatchPlan, PlanError, Rows, plan_batch
from verl_padding.plan.row_keys import rows_of_sessions
from verl_padding.prefix_sharing.detection import PrefixDetection
from verl_padding.prefix_sharing.repeated_tokens import MASK, mask_repeated_tokens

logger = logging.getLogger(__name__)

PLAN_SECONDS = "timing_s/padding/plan"


def update_seed(configured: int, step: int, local_update: int) -> int:
    """A seed for the planner that differs in each local update, from 0 in each global step, and is
    the same in a resumed run."""
    return int(np.random.SeedSequence([configured, step, local_update]).generate_state(1)[0])


class PlannedUpdate(PaddedBatch):
    """The real rows of a local update, and the plan of its worker calls.

    A PaddingDataError refuses rows that cannot be planned. Masks of repeated tokens may have been
    changed by then, and the pass for old log-probs been kept.

    Args:
        step: the global step.
        seed: of the planner's shuffle.
        template: what pads are made from.
        dp_sizes: data-parallel size of each worker call, as the worker groups have it.
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
    ):
        self._job, self._step, self._log_once = job, step, log_once
        self.seconds: dict[str, float] = {}
        """Metric -> seconds that planning, and putting pads, took."""
        self.repeated_tokens: int | None = None
        """Tokens that an earlier row trains, where they are masked."""
        self._dropped: list[int] = []
        """The rows that the actor's update left out when it was called last."""
        self._called: set[str] = set()
        counted = (names.ALL_COMPUTED_TOKENS, *names.SAVED_TOKENS)
        self._work: dict[str, float] = dict.fromkeys(counted, 0)
        """Metric -> tokens of rows that the calls have computed so far, or need not compute."""
        with simple_timer(PLAN_SECONDS, self.seconds):
            self._tokens_R = tokens_of_tags(batch.tags)
            self.prefixes = PrefixDetection(batch, may_have_images=job.has_images)
            # TransferQueue raises when it is asked for no row; the planner refuses such a batch.
            may_branch = self._prepare_rows(batch) if batch.keys else job.may_branch
            planner_job = job.planner_job(
                dp_sizes=dp_sizes,
                updates_actor=job.updates_actor(step),
                seed=seed,
                pad_tokens=template.length,
            )
            self._planner_job = replace(planner_job, may_branch=may_branch)
            self.first_plan = self._plan_calls(batch.keys)
            """The plan of all rows, before any is left out."""
            super().__init__(
                batch,
                self.first_plan,
                template,
                weighting=loss_weighting(job.config, job.padding),
                own_old_log_probs=job.skips_old_log_probs,
            )

    def _prepare_rows(self, batch: KVBatchMeta) -> bool:
        """Settles what the plan depends on; returns whether rows may share before they branch."""
        padding = self._job.padding
        # Refused here, before anything is changed, if an agent loop has not said what advantages
        # need.
        if padding.advantages == "session":
            _ = self.prefixes.parent_R
        if padding.baseline == "role":
            read_roles(batch.keys, batch.partition_id)
        self._keep_pass_that_rows_need(batch)
        by_row = [name for name in ("advantages", "weighting") if getattr(padding, name) == "row"]
        if by_row and len(rows_of_sessions(batch.keys)) < len(batch):
            session = " and ".join(f"padding.{name}=session" for name in by_row)
            self._log(
                "sessions have several rows, and each row counts as a sample. If the rows of a "
                f"session are one rollout with one reward, set {session} (docs/sessions.md).",
                "rows of sessions",
            )
        if padding.repeated_tokens == "once":
            self.repeated_tokens = mask_repeated_tokens(batch, self.prefixes)
        # What sees an image may see more than what is before it, by a mask of the model's.
        if self._job.shares and self._job.may_branch and self.prefixes.has_images:
            self._log("full-prefix sharing only, as rows have images", "images")
            return False
        return self._job.may_branch

    def _keep_pass_that_rows_need(self, batch: KVBatchMeta) -> None:
        """Keeps the pass for old log-probs, from now on, if a second optimizer step compares with
        them, or verl's trainer something that a row has."""
        if not self._job.skips_old_log_probs:
            return
        incompatibilities, planner_job = [], self._job.planner_job()
        if (steps := planner_job.steps_of_batch(planner_job.updates[ACTOR], len(batch))) > 1:
            setting = f"padding.optimizer_steps={planner_job.optimizer_steps}"
            why = f"the second of {steps} optimizer steps needs old log-probs"
            incompatibilities.append(Incompatibility(setting, why, "Set it to configured."))
        correction = self._job.config.algorithm.get("rollout_correction")
        if correction is not None and SourceRows(batch).keys_with("rollout_log_probs"):
            why = "verl's trainer compares it with old log-probs"
            fix = "Have the agent loop return none, or set algorithm.rollout_correction=null."
            incompatibilities.append(Incompatibility("field rollout_log_probs", why, fix))
        self._job.savings.block(OLD_LOG_PROBS, incompatibilities)

    def _plan_calls(self, keys: Sequence[str], dropped: Sequence[int] = ()) -> BatchPlan:
        """The plan of the calls.

        With rows ``dropped``, the actor's update leaves those out. All calls are planned even so:
        ``lcm`` cuts the actor's mini-batches by the critic's sizes, too.
        """
        shares = self._planner_job.sharing == "on" and keys
        tries = self.prefixes.by_outputs if shares else None
        # Planned before a pad is put: what is refused leaves the queue as it was.
        try:
            rows = Rows.from_keys(keys, self._tokens_R, tries, dropped)
            plan = plan_batch(rows, self._planner_job)
        except PlanError as refusal:
            raise PaddingDataError(f"step {self._step}: {refusal}") from refusal
        for warning in () if dropped else plan.warnings:
            logger.warning("verl_padding: step %d: %s", self._step, warning)
        return plan

    def _log(self, message: str, about: str) -> None:
        self._log_once(f"step {self._step}: {message}", about=about)

    def worker_batch(self, call: str, batch: KVBatchMeta) -> KVBatchMeta:
        """What workers get in a call.

        An update that leaves out rows without an advantage is planned again: now advantages are
        known. Until then the plan holds all rows, so that what cannot be planned was refused before
        any pass.
        """
        if call == ACTOR:
            self._prepare_actor()
        self._called.add(call)
        return super().worker_batch(call, batch)

    def _prepare_actor(self) -> None:
        job = self._job
        if job.skips_old_log_probs and ACTOR in self._called and not self.has_old_log_probs():
            refuse(
                f"padding.recompute_old_log_probs={job.padding.recompute_old_log_probs}",
                "the actor is updated more than once in a step",
                "Set it to True.",
            )
        dropped = find_zero_advantage_rows(self.batch) if job.drops_zero_advantage else []
        # It may be called twice, and a trainer of one's own may change advantages between.
        if dropped == self._dropped:
            return
        self._dropped = dropped
        with simple_timer(PLAN_SECONDS, self.seconds):
            plan = self._plan_calls(self.batch.keys, dropped)
            self.plan = replace(
                self.plan,
                layouts={**self.plan.layouts, ACTOR: plan.layouts[ACTOR]},
                figures={**self.plan.figures, ACTOR: plan.figures[ACTOR]},
            )
            vars(self).pop("mask_R", None)  # read anew
            self.put_pads()

    def note_work(self, call: str, tokens: int, epochs: int) -> None:
        """Notes the tokens that reached the models in all epochs of a call, of pads too, and says
        so in the log where the plan has fewer: then it is slower than planned, and takes more
        memory."""
        layout = self.plan.layouts[call]
        computed = tokens - epochs * layout.n_pads * self.pad_length
        dropped = epochs * sum(self._tokens_R[row] for row in chain(*layout.dropped))
        # An update of 100 tokens over 2 epochs, of which 30 are shared and 20 of rows left out: 100
        # are computed, 60 and 40 saved.
        shared, zero_advantage, _ = names.SAVED_TOKENS
        self._work[names.ALL_COMPUTED_TOKENS] += computed
        self._work[shared] += epochs * sum(self._tokens_R) - dropped - computed
        self._work[zero_advantage] += dropped
        if computed > (planned := epochs * self.plan.figures[call].computed_tokens):
            self._log(
                f"{computed:,} tokens reached the models in worker call {call!r}, more than the "
                f"{planned:,} of the plan",
                "computed tokens",
            )

    def metrics(self) -> dict[str, float]:
        """What was planned, and under verl's name the tokens that ranks get of all rows."""
        layouts = self.plan.layouts
        metrics = plan_metrics(self.plan, self._tokens_R, self.pad_length) | self.seconds
        if self.repeated_tokens is not None:
            metrics["padding/repeated_tokens/total"] = self.repeated_tokens
        if self._job.drops_zero_advantage and ACTOR in layouts:
            n_dropped = sum(map(len, layouts[ACTOR].dropped))
            metrics[names.DROPPED_ROWS.format(update=ACTOR)] = n_dropped
        return metrics | rank_token_metrics(self.first_plan, self._tokens_R, self.pad_length)

    def final_metrics(self) -> dict[str, float]:
        """The same once the updates were made, with what was computed and left out, and with the
        optimizer steps whose rows have no trained token."""
        layouts = self.plan.layouts
        saves_pass = self._job.skips_old_log_probs and LOG_PROB not in self._called
        pass_tokens = sum(self._tokens_R) if saves_pass and ACTOR in layouts else 0
        saved = {names.SAVED_TOKENS[-1]: pass_tokens, names.SAVED_PASSES: int(pass_tokens > 0)}
        idle_steps = {
            f"padding/{call}/idle_steps/total": self.idle_steps(call)
            for call in layouts
            if CALL_BY_NAME[call].trains
        }
        return self.metrics() | self._work | saved | idle_steps

    def trained_rows(self) -> TrainedRows:
        """The rows after the update, read from TransferQueue."""
        fields = read_fields(self.batch.keys, self.batch.partition_id, FIELDS)
        return TrainedRows.from_fields(self.batch, fields, self.mask_R)


def find_zero_advantage_rows(batch: KVBatchMeta) -> list[int]:
    """Numbers of the rows without a trained token, or with an advantage of exactly 0 on each.

    Those with a trained token come first, the shortest first: an update of such rows alone computes
    the first.
    """
    rows = read_fields(batch.keys, batch.partition_id, ("advantages", MASK))
    mask_R = rows[MASK].unbind()
    pairs = enumerate(zip(rows["advantages"].unbind(), mask_R, strict=True))
    idle = [row for row, (advantage, mask) in pairs if not (advantage * mask).any()]
    return sorted(idle, key=lambda row: (not mask_R[row].any(), batch.tags[row]["seq_len"], row))
