"""The steps of a padded job: what the overrides of the trainer's methods do."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from verl.utils.profiler import simple_timer

from verl_padding.config import MIN_PAD_LENGTH
from verl_padding.driver import step_metrics
from verl_padding.driver.planned_update import PlannedUpdate, update_seed
from verl_padding.driver.samples import rows_counted_as_samples
from verl_padding.driver.step_record import write_record
from verl_padding.driver.worker_calls import (
    dp_size,
    probe_models,
    unplanned,
    wrap_worker_groups,
)
from verl_padding.errors import Incompatibility
from verl_padding.job.calls import CALLS
from verl_padding.job.modes import SYNC
from verl_padding.job.savings import OLD_LOG_PROBS, saved_line
from verl_padding.job.verl_job import VerlJob
from verl_padding.pads.prompt_order import data_order
from verl_padding.pads.queue import KVBatchMeta, clear, set_aside
from verl_padding.pads.tags import PADDING_TAG
from verl_padding.pads.template import PadTemplate, Schema
from verl_padding.pads.upsampling import image_of_pads, images_of_rows
from verl_padding.pads.vision_families import image_maker

logger = logging.getLogger(__name__)

TRAIN = "train"
"""verl's name for the queue's partition of training rows."""


def own_updates(trainer: Any) -> Iterator[Incompatibility]:
    """What a trainer of one's own may do with old log-probs: write some, or use them twice."""
    for name in ("_compute_old_log_prob", "_update_actor", "_step_once"):
        owner = next(cls for cls in type(trainer).__mro__ if name in vars(cls))
        if owner.__module__.partition(".")[0] not in ("verl", "verl_padding"):
            why = "your own trainer may write old log-probs, or update the actor twice"
            fix = "Set padding.recompute_old_log_probs=True."
            yield Incompatibility(f"{owner.__name__}.{name}", why, fix)


class TrainingSteps:
    """The steps of a trainer of verl that has been set up; its worker groups are wrapped here.

    :meth:`plan_and_put_pads` comes before the worker calls of a local update, :meth:`local_update`
    is around it, and :meth:`compute_metrics` after the local updates of a global step.
    """

    def __init__(self, trainer: Any, job: VerlJob):
        self._trainer, self._job, self._config = trainer, job, job.config
        self.current: PlannedUpdate | None = None
        """The local update that runs."""
        job.savings.block(OLD_LOG_PROBS, own_updates(trainer))
        self._worker_groups = wrap_worker_groups(trainer, job, self.update_for)
        self._schema = Schema(job.padding.fields)
        self._said: set[str] = set()  # in the log
        self._updates: list[PlannedUpdate] = []  # of the global step
        self._savings: Counter[str] = Counter()
        self._show_savings()
        self.has_probed = False
        """Whether the models have shown that they keep packed rows apart."""

    def start(self) -> None:
        """Begins a global step."""
        self._updates = []

    def plan_and_put_pads(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> None:
        """Plans the rows of a local update, and puts their pads.

        The batch is put in the order of the data set, in place: its rows come in the order in which
        their sessions ended, which no run repeats.
        """
        # The planner refuses a batch without a row.
        if batch.keys and not self.has_probed:
            probe_models(self._worker_groups, self._job, batch)
            self.has_probed = True
        batch.reorder(data_order(batch.keys))
        step = self._trainer.global_steps
        update = PlannedUpdate(
            self._job,
            batch,
            step=step,
            seed=update_seed(self._job.padding.seed, step, self._trainer.local_trigger_step),
            template=self._template(batch),
            dp_sizes={
                call.name: dp_size(getattr(self._trainer, call.worker_group), call.mesh)
                for call in CALLS
                if call.role in self._job.engines
            },
            log_once=self._log_once,
        )
        self._show_savings()
        # Known before the pads are put: whatever interrupts the step from here on, they are taken
        # out again.
        self.current = update
        with simple_timer("timing_s/padding/upsample", update.seconds):
            update.put_pads()
        metrics |= update.metrics()

    def update_for(self, call: str, batch: KVBatchMeta) -> PlannedUpdate:
        """The update that has planned a worker call; a PaddingDataError for a call that it has not
        planned, or that brings other rows."""
        update, keys = self.current, sorted(batch.keys)
        if update is not None and call in update.plan.layouts and sorted(update.batch.keys) == keys:
            return update
        raise unplanned(call, batch)

    @contextmanager
    def local_update(self, metrics: dict[str, Any]) -> Iterator[None]:
        """Around verl's ``_step_once``: takes the pads out afterwards, whatever happens, and adds
        the update's metrics."""
        try:
            yield
        finally:
            update, self.current = self.current, None
            if update is not None:
                clear(update.pads.keys, update.pads.partition_id)
        assert update is not None, "a local update without a plan"
        final = update.final_metrics()
        self._savings.update(final)
        metrics |= final | step_metrics.worker_metrics(metrics)
        self._updates.append(update)

    def hide_rows_without_loss(self, batch: KVBatchMeta) -> None:
        """Marks the rows of the local update that verl's means over rows are to leave out as verl
        marks its pads, in this batch alone."""
        update = self.current
        assert update is not None, "a local update without a plan"
        keys, tokens_R = update.batch.keys, update.loss_tokens_R
        with_loss = [row for row, tokens in enumerate(tokens_R) if tokens]
        samples = {keys[row] for row in rows_counted_as_samples(keys, with_loss)}
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if key not in samples:
                tag[PADDING_TAG] = True

    def compute_metrics(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> None:
        """Metrics of all local updates of a global step, and their record."""
        rows_of = [update.trained_rows() for update in self._updates]
        metrics |= step_metrics.session_metrics(rows_of)
        metrics |= step_metrics.advantage_metrics(rows_of)
        # In the place of what verl's trainer has computed just before, of real rows alone.
        tokens = response = 0
        for update, rows in zip(self._updates, rows_of, strict=True):
            layout = step_metrics.layout_for_verl_metrics(update.first_plan)
            n_pads = layout.n_pads if layout else 0
            tokens += int(rows.tokens_R.sum()) + n_pads * update.pad_length
            response += int(rows.response_R.sum()) + n_pads  # a token each
        n_gpus = self._trainer._get_n_gpus_for_throughput()
        metrics |= step_metrics.performance_metrics(tokens, response, timing_raw, n_gpus)
        write_record(self._job, self._trainer.global_steps, self._updates, rows_of)

    def rows_set_aside(self) -> AbstractContextManager[None]:
        """A with-block in which TransferQueue has neither the rows that the step has trained nor
        pads.

        verl clears a step's rows after it has saved: its snapshot of TransferQueue would bring rows
        that the saved weights have been trained on back into a resumed run. Its metrics and its
        dump still need them afterwards. Outside of verl's loop they may be gone by now; inside of a
        step its pads are there.
        """
        batches = [update.batch for update in self._updates]
        if self.current is not None:
            batches += [self.current.batch, self.current.pads]
        return set_aside(batches if self._job.mode != SYNC else [])

    def _log_once(self, message: str, about: str = "") -> None:
        """Says something in the log, the first time that the job meets what it is ``about``: by
        default, the message."""
        about = about or message
        if about not in self._said:
            self._said.add(about)
            logger.warning("verl_padding: %s", message)

    def _show_savings(self) -> None:
        """Says in the log which savings the job has, once and again where it loses one."""
        self._log_once("\n  ".join(["savings:", *self._job.savings.lines()]))

    def log_savings(self) -> None:
        """Says in the log what the savings have left out, at the end of a run."""
        if line := saved_line(self._savings):
            self._log_once(line)

    def _template(self, batch: KVBatchMeta) -> PadTemplate:
        """What the pads of a batch are made from."""
        job, tokenizer, make = self._job, self._trainer.tokenizer, None
        if job.has_vision:
            make = image_maker(job.padding.multimodal, job.model_config)
        # With a vision model, only the rows say whether this batch shows it anything.
        image = image_of_pads(images_of_rows(batch), make)
        # Only the model reads it.
        tokens = [tokenizer.eos_token_id, tokenizer.pad_token_id, 0]
        return PadTemplate(
            eos_token_id=next(int(token) for token in tokens if token is not None),
            length=job.pad_length(1 + len(image.token_ids) if image else MIN_PAD_LENGTH),
            schema=self._schema,
            image=image,
        )
