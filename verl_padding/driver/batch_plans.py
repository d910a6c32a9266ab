"""How a padded trainer plans the batches of its steps, and what the pads of a batch are made from."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_padding.config import MIN_PAD_LENGTH, PaddingConfig
from verl_padding.driver.actor_watch import ActorWatch
from verl_padding.driver.idle_rows import find_idle_rows
from verl_padding.driver.step_timing import StepTiming
from verl_padding.driver.worker_calls import dp_size
from verl_padding.errors import PaddingDataError
from verl_padding.job import metric_names as names
from verl_padding.job.calls import ACTOR, CALLS
from verl_padding.job.job_reader import JobReader, translate_plan_error
from verl_padding.pads.lineage import find_extensions, find_forest
from verl_padding.pads.loss_weighting import LossWeighting
from verl_padding.pads.padded_batch import PaddedBatch, strip_after_an_error
from verl_padding.pads.queue import KVBatchMeta
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.pads.template import PadTemplate, Schema
from verl_padding.pads.upsampling import find_images, strip
from verl_padding.pads.vision_families import image_maker
from verl_padding.plan import BatchPlan, PlanError, Rows, plan_batch

if TYPE_CHECKING:
    from verl.trainer.ppo.v1 import PPOTrainer as VerlTrainer
else:
    VerlTrainer = object  # a mixin, as the padded trainer is

logger = logging.getLogger(__name__)


class PlansBatches(VerlTrainer):
    """The part of :class:`~verl_padding.driver.mixin.PaddedTrainer` that plans; that one sets what it reads."""

    _job_reader: JobReader
    _padding: PaddingConfig
    _schema: Schema
    _loss_weightings: Sequence[LossWeighting]
    _own_old_log_probs: bool
    _timing: StepTiming | None
    _watch: ActorWatch | None
    _padded_batch: PaddedBatch | None
    _hinted = False
    """Whether the log has the plan's hint already."""

    def _plan(
        self, batch: KVBatchMeta, tokens_R: Sequence[int], metrics: dict[str, Any], call: str | None = None
    ) -> tuple[BatchPlan, PadTemplate]:
        """The plan of a local update, or of one call, and what its pads are made from."""
        template = self._template(batch)
        job = self._job_reader.step_job(
            calls=None if call is None else [call],
            dp_sizes=self._dp_sizes(),
            updates_actor=self.config.trainer.critic_warmup <= self.global_steps,
            seed=self._step_seed(),
            pad_tokens=template.length,
        )
        if call is None and self._timing is not None:
            self._timing.start_update(job)
        extends_R = forest = None
        if job.sharing != "off":
            started = time.perf_counter()
            if job.sharing == "trees":
                forest = find_forest(batch, tokens_R)
            else:
                extends_R = find_extensions(batch, tokens_R, images=self._job_reader.has_images)
            metrics[names.LINEAGE_SECONDS] = time.perf_counter() - started
        idle: Sequence[int] = ()
        if call is None and ACTOR in job.updates and job.updates[ACTOR].skips_idle:
            by_session, images = self._padding.advantages == "session", self._job_reader.has_images
            idle = find_idle_rows(batch, self.config, by_session=by_session, images=images)
        try:
            plan = plan_batch(Rows.from_keys(batch.keys, tokens_R, extends_R, forest, idle), job)
        except PlanError as refusal:
            raise PaddingDataError(f"step {self.global_steps}: {translate_plan_error(refusal)}") from refusal
        hints = [translate_plan_error(plan.hint)] if plan.hint and not self._hinted else []
        self._hinted |= bool(hints)
        for warning in (*plan.warnings, *hints):
            logger.warning("verl_padding: step %d: %s", self.global_steps, warning)
        return plan, template

    def _padded(
        self, batch: KVBatchMeta, plan: BatchPlan, template: PadTemplate, *, timed: bool = False
    ) -> PaddedBatch:
        return PaddedBatch(
            batch,
            plan,
            template,
            loss_weightings=self._loss_weightings,
            timed=timed,
            own_old_log_probs=ACTOR if self._own_old_log_probs else None,
            skips_idle=ACTOR if self._padding.idle_rows == "skip" else None,
        )

    def _template(self, batch: KVBatchMeta) -> PadTemplate:
        """What the pads of a batch are made from."""
        reader, image = self._job_reader, None
        # With a vision model, only the rows say whether this batch shows it anything.
        if reader.has_vision and (images := find_images(batch)) is not None:
            maker = image_maker(self._padding.multimodal, reader.model_config)
            image = maker(images) if maker is not None else None
        tokens = [self.tokenizer.eos_token_id, self.tokenizer.pad_token_id, 0]  # whichever: only the model reads it
        return PadTemplate(
            eos_token_id=int(next(token for token in tokens if token is not None)),
            length=reader.pad_length(1 + len(image.token_ids) if image else MIN_PAD_LENGTH),
            schema=self._schema,
            n_experts=lambda: reader.n_experts,
            image=image,
        )

    def _dp_sizes(self) -> dict[str, int]:
        """Data-parallel size of each worker call, as the worker groups have it."""
        calls = [call for call in CALLS if call.role in self._job_reader.engines]
        return {call.name: dp_size(getattr(self, call.worker_group), call.mesh) for call in calls}

    def _step_seed(self) -> int:
        """A seed that differs in each local update, and is the same in a resumed run."""
        parts = [self._padding.seed, self.global_steps, self.local_trigger_step]
        return int(np.random.SeedSequence(parts).generate_state(1)[0])

    @contextmanager
    def _plan_single_call(self, call: str, batch: KVBatchMeta) -> Iterator[PaddedBatch]:
        """A plan and pads for one worker call with rows that the step has not planned for it."""
        step, timed = self._padded_batch, False
        corrects = step is not None and step.is_for(call, batch)  # the step's plan leaves out what is computed now
        if step is not None and corrects:
            batch, timed = step.batch, self._timing is not None
        plan, template = self._plan(batch, tokens_of_tags(batch.keys, batch.tags), {}, call)
        padded = self._padded(batch, plan, template, timed=timed)
        if step is not None and corrects:
            step.corrected[call] = plan
        try:
            padded.put_pads()
            yield padded
            strip(padded.pads)
        except BaseException:
            self._strip_after_an_error(padded)
            raise

    def _strip_after_an_error(self, padded: PaddedBatch) -> None:
        # After the loss of an actor the job ends, perhaps because the very queue that holds the pads is gone.
        if not (self._watch and self._watch.lost):
            strip_after_an_error(padded)
