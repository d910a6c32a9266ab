"""Plans the rows of a local update."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from verl.utils.profiler import simple_timer

from verl_padding.config import MIN_PAD_LENGTH
from verl_padding.driver.planned_step import PlannedStep, UpdateNumber
from verl_padding.errors import PaddingDataError
from verl_padding.job import metric_names as names
from verl_padding.job.blocker import Blocker
from verl_padding.job.calls import ACTOR
from verl_padding.job.loss_weightings import loss_weightings
from verl_padding.job.savings import OLD_LOG_PROBS
from verl_padding.job.verl_job import VerlJob, translate_plan_error
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.prompt_order import data_order
from verl_padding.pads.queue import KVBatchMeta
from verl_padding.pads.source_rows import SourceRows
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.pads.template import PadTemplate, Schema
from verl_padding.pads.upsampling import find_images
from verl_padding.pads.vision_families import image_maker
from verl_padding.plan import PlanError, Rows, plan_batch
from verl_padding.plan.row_keys import rows_of_sessions
from verl_padding.prefix_sharing.detection import PrefixDetection
from verl_padding.prefix_sharing.repeated_tokens import mask_repeated_tokens

logger = logging.getLogger(__name__)


class StepPlanner:
    """Plans the batches of a job.

    Args:
        pad_token_id: the token that pads are made of.
        dp_sizes: data-parallel size of each worker call, as the worker groups have it.
    """

    def __init__(
        self,
        job: VerlJob,
        *,
        pad_token_id: int,
        dp_sizes: Callable[[], Mapping[str, int]],
    ):
        self.job = job
        self._pad_token_id, self._dp_sizes = pad_token_id, dp_sizes
        self._schema = Schema(job.padding.fields)
        self._loss_weightings = loss_weightings(job.config, job.padding)
        self._logged: set[str] = set()

    def plan(
        self, batch: KVBatchMeta, number: UpdateNumber, calls: Collection[str] | None = None
    ) -> "PlannedStep":
        """The step of a batch; its pads are not in TransferQueue yet.

        The batch is put in the order of the data set, in place: its rows come in the order in which
        their sessions ended, which no run repeats. ``calls`` are planned, by default all that the
        update makes. A PaddingDataError refuses rows that cannot be planned; by then, masks of
        repeated tokens alone have been changed.
        """
        seconds: dict[str, float] = {}
        with simple_timer(names.PLAN_SECONDS, seconds):
            batch.reorder(data_order(batch.keys))
            prefixes = self.detect_prefixes(batch)
            repeated = None
            # TransferQueue raises when it is asked for no row; the planner refuses such a batch.
            if batch.keys and calls is None:
                self._block_what_rows_need(batch)
                self._tell_what_rows_count_as(batch, number)
                if self.job.padding.repeated_tokens == "once":
                    repeated = mask_repeated_tokens(batch, prefixes)
            padded = self.pad(batch, number, prefixes, calls)
        return PlannedStep(
            self, padded, number, prefixes, calls, repeated_tokens=repeated, seconds=seconds
        )

    def _block_what_rows_need(self, batch: KVBatchMeta) -> None:
        """Keeps the pass for old log-probs, from now on, if a second optimizer step compares with
        them, or verl's trainer something that a row has."""
        if not self.job.leaves_out_old_log_probs:
            return
        blockers, job, name = [], self.job.step_job(), "rollout_log_probs"
        if (steps := job.steps_of_batch(job.updates[ACTOR], len(batch))) > 1:
            setting = f"padding.optimizer_steps={job.optimizer_steps}"
            why = f"the second of {steps} optimizer steps compares with them"
            blockers.append(Blocker(setting, why, "Set it to configured."))
        correction = self.job.config.algorithm.get("rollout_correction")
        if correction is not None and (having := SourceRows(batch).keys_with(name)):
            why = "verl's trainer compares it with old log-probs"
            fix = "Have the agent loop return none, or set algorithm.rollout_correction=null."
            blockers.append(Blocker(f"field {name} of {having[0]}", why, fix))
        self.job.savings.block(OLD_LOG_PROBS, blockers)

    def _tell_what_rows_count_as(self, batch: KVBatchMeta, number: UpdateNumber) -> None:
        """Says in the log, when sessions first have several rows, what each row is a sample to."""
        by_row = [
            f"padding.{name}"
            for name in ("advantages", "weighting")
            if getattr(self.job.padding, name) == "row"
        ]
        if by_row and len(rows_of_sessions(batch.keys)) < len(batch):
            settings = " and ".join(f"{name}=row" for name in by_row)
            self.log_once(
                f"step {number.global_step}: sessions have several rows, and each row counts as a "
                f"sample, by {settings}. Where the rows of a session are one rollout with one "
                f"reward, set {' and '.join(f'{name}=session' for name in by_row)} "
                "(docs/sessions.md).",
                about="rows of sessions",
            )

    def detect_prefixes(self, batch: KVBatchMeta) -> PrefixDetection:
        """How far the rows of a batch begin alike, as it will be found when it is asked for."""
        tokens_R = tokens_of_tags(batch.keys, batch.tags)
        return PrefixDetection(batch, tokens_R, may_have_images=self.job.has_images)

    def pad(
        self,
        batch: KVBatchMeta,
        number: UpdateNumber,
        prefixes: PrefixDetection,
        calls: Collection[str] | None,
        left_out: Sequence[int] = (),
    ) -> PaddedBatch:
        """Plans rows for the calls of a step, and makes their pads, which are not put yet.

        With rows ``left_out``, the result is of the actor's update alone, since that leaves them
        out. All calls are planned even so, and the others dropped: ``lcm`` cuts the actor's
        mini-batches by the critic's sizes, too.
        """
        template = self._template(batch)
        job = self.job.step_job(
            calls=calls,
            dp_sizes=self._dp_sizes(),
            updates_actor=self.job.updates_actor(number.global_step),
            seed=number.seed(self.job.padding.seed),
            pad_tokens=template.length,
        )
        branches, forest = None, None
        if self.job.shares and batch.keys:
            branches, forest = self._may_branch(prefixes, number), prefixes.by_outputs
            job = replace(job, may_branch=branches)
        tokens_R = tokens_of_tags(batch.keys, batch.tags)
        # Planned before a pad is put: what is refused leaves the queue as it was.
        try:
            plan = plan_batch(Rows.from_keys(batch.keys, tokens_R, forest, left_out), job)
        except PlanError as refusal:
            message = f"step {number.global_step}: {translate_plan_error(refusal)}"
            raise PaddingDataError(message) from refusal
        if left_out:
            layouts, figures = {ACTOR: plan.layouts[ACTOR]}, {ACTOR: plan.figures[ACTOR]}
            plan = replace(plan, layouts=layouts, figures=figures, warnings=(), hint=None)
        for warning in plan.warnings:
            logger.warning("verl_padding: step %d: %s", number.global_step, warning)
        if plan.hint:
            hint = f"step {number.global_step}: {translate_plan_error(plan.hint)}"
            self.log_once(hint, about="hint")
        return PaddedBatch(
            batch,
            plan,
            template,
            denominator=self.job.padding.denominator,
            loss_weightings=self._loss_weightings,
            branches=branches,
            # Rows of a single call have other numbers than those of the step.
            timed=self.job.padding.timing and calls is None,
            own_old_log_probs=ACTOR if self.job.leaves_out_old_log_probs else None,
            skips_idle=ACTOR if self.job.skips_zero_advantage_rows else None,
        )

    def log_once(self, message: str, about: str = "") -> None:
        """Says something in the log, the first time that the job meets what it is ``about``: by
        default, the message."""
        about = about or message
        if about not in self._logged:
            self._logged.add(about)
            logger.warning("verl_padding: %s", message)

    def _may_branch(self, prefixes: PrefixDetection, number: UpdateNumber) -> bool:
        """Whether rows of a step that part may share what is before."""
        if self.job.may_branch and prefixes.has_images:
            # What sees an image may see more than what is before it, by a mask of the model's.
            why = "rows have images, so in such batches rows share whole beginnings alone"
            self.log_once(f"step {number.global_step}: {why}", about="images")
        return self.job.may_branch and not prefixes.has_images

    def _template(self, batch: KVBatchMeta) -> PadTemplate:
        """What the pads of a batch are made from."""
        image = None
        # With a vision model, only the rows say whether this batch shows it anything.
        if self.job.has_vision and (images := find_images(batch)) is not None:
            maker = image_maker(self.job.padding.multimodal, self.job.model_config)
            image = maker(images) if maker is not None else None
        return PadTemplate(
            eos_token_id=self._pad_token_id,
            length=self.job.pad_length(1 + len(image.token_ids) if image else MIN_PAD_LENGTH),
            schema=self._schema,
            image=image,
        )
