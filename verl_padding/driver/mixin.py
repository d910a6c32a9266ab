"""What makes one of verl's trainers a padded one."""

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from verl.utils.tensordict_utils import assign_non_tensor_stack

from verl_padding.driver import advantages, batch_metrics, step_metrics
from verl_padding.driver.actor_watch import ActorWatch, actors_of
from verl_padding.driver.batch_plans import PlansBatches
from verl_padding.driver.session_counts import SessionCounts
from verl_padding.driver.step_record import LocalUpdate, StepRecord
from verl_padding.driver.step_timing import StepTiming
from verl_padding.driver.stock_guard import TakesPadding
from verl_padding.driver.trained_rows import TrainedRows
from verl_padding.driver.worker_calls import probe_models, wrap_worker_groups
from verl_padding.job import metric_names as names
from verl_padding.job.attention import use_torch_attention
from verl_padding.job.calls import ACTOR, CALL_BY_NAME, LOG_PROB
from verl_padding.job.job_reader import check_job
from verl_padding.job.loss_weightings import loss_weightings
from verl_padding.job.modes import SYNC
from verl_padding.pads.columns import NO_ADAPTER
from verl_padding.pads.loss_weighting import TOKEN_MODES
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.prompt_order import data_order, ordered_uid
from verl_padding.pads.queue import KVBatchMeta, actors_of_queue, clear_leftovers, set_aside
from verl_padding.pads.queue_claim import check_queue_owner, claim_queue, release_queue
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.pads.template import Schema
from verl_padding.pads.upsampling import strip
from verl_padding.plan.counted import counted

if TYPE_CHECKING:
    from verl.trainer.ppo.v1 import PPOTrainer as VerlTrainer
else:
    VerlTrainer = object  # a mixin: it comes before one of verl's trainers, which brings the base

logger = logging.getLogger(__name__)

SEQLEN = "global_seqlen"
"""verl's prefix for metrics of the tokens that ranks get."""


class PaddedTrainer(PlansBatches, TakesPadding, VerlTrainer):
    """Mixin before one of verl's v1 trainers: plans each batch, pads its worker calls, and nothing else.

    The batch that verl's methods pass around holds real rows only, from sampling to the rollout dump. Pads lie in
    TransferQueue from :meth:`_balance_batch` to the end of :meth:`_step_once`, and only the worker groups, which
    :meth:`_setup` wraps, send them along.
    """

    extends: ClassVar[str]
    """The verl mode whose trainer this one extends."""

    def __init__(self, config: DictConfig):
        check_queue_owner()
        use_torch_attention(config)
        self._job_reader = check_job(config, self.extends)
        self._padding = self._job_reader.padding
        advantages.check_advantages_stay_with_rows(config)
        self._own_old_log_probs = self._padding.old_log_probs == "update"
        self._loss_weightings = loss_weightings(config, self._padding)
        self._schema = Schema(self._padding.fields)
        self._watch: ActorWatch | None = None
        self._timing: StepTiming | None = None
        self._session_counts = SessionCounts(config.actor_rollout_ref.rollout.n)
        self._record = StepRecord(config, self._padding)
        self._probed = False
        self._warned_of_idle_steps = False
        self._fetched = (0, 0)  # step, and prompts fetched in it so far
        self._padded_batch: PaddedBatch | None = None
        # Of the local updates of the step: their rows, where these went, and the tags of the pads that the workers got.
        self._trained: list[KVBatchMeta] = []
        self._updates: list[LocalUpdate] = []
        self._pad_tags: list[dict[str, Any]] = []
        # verl compares the name of the mode with its own and looks up sections of the config by it.
        config.trainer.v1.trainer_mode = self.extends
        super().__init__(config)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self._job_reader.check_models()  # the model is at hand now, and no worker has started

    def _build_replay_buffer(self) -> Any:
        return self._session_counts.watch(advantages.filter_groups_by_sessions(super()._build_replay_buffer()))

    def _setup(self) -> None:
        claim_queue()
        try:
            super()._setup()
            clear_leftovers("train")  # verl's name for the part of TransferQueue that training rows are in
            self._worker_groups = wrap_worker_groups(
                self, self._job_reader, lambda: self._padded_batch, self._plan_single_call
            )
            if self._padding.timing:
                self._timing = StepTiming(self._worker_groups)
            agent = self.config.actor_rollout_ref.rollout.agent
            if not agent.get("agent_loop_manager_class"):  # verl.trainer.main_ppo makes it next
                with open_dict(agent):
                    agent.agent_loop_manager_class = "verl_padding.driver.agent_loops.PaddedAgentLoopManager"
        except BaseException:
            release_queue()
            raise

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            queue = actors_of_queue()
            self._watch = ActorWatch(lambda: actors_of(self) | queue)
            with self._watch.over():
                super().fit(agent_loop_manager)
        finally:
            release_queue()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        self._trained, self._updates, self._pad_tags = [], [], []
        self._session_counts.start_step()
        return super().step(metrics, timing_raw)

    def _fetch_one_gen_batch(self) -> TensorDict:
        """verl's next prompts from the data loader, under uids that tell their order."""
        batch = super()._fetch_one_gen_batch()
        step, fetched = self._fetched if self._fetched[0] == self.global_steps else (self.global_steps, 0)
        self._fetched = (step, fetched + len(batch))
        uids = [ordered_uid(step, place) for place in range(fetched, fetched + len(batch))]
        assign_non_tensor_stack(batch, "uid", uids)
        return batch

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        """verl's local update, at the end of which the pads are taken out, whatever happens in it."""
        seconds_before = dict(timing_raw)
        try:
            batch = super()._step_once(metrics, timing_raw, sample_batch_size)
            assert self._padded_batch is not None, "a step without a plan"
            self._pad_tags += self._padded_batch.pads.tags
            strip(self._padded_batch.pads)
            update = LocalUpdate.of(self._padded_batch)
            if self._padded_batch.corrected:
                metrics.update(self._plan_metrics(self._padded_batch))
            metrics.update(self._idle_steps(self._padded_batch))
            if self._padding.idle_rows == "skip":
                metrics[names.MISTAKEN_IDLE_ROWS] = self._padded_batch.mistaken
        except BaseException:
            if self._padded_batch is not None:
                self._strip_after_an_error(self._padded_batch)
            raise
        finally:
            self._padded_batch = None
        metrics.update(step_metrics.worker_metrics(metrics, seconds_before, timing_raw))
        if self._own_old_log_probs:
            metrics.pop(names.CALL_SECONDS.format(call=LOG_PROB), None)  # verl times the pass that is not made
        # What verl takes from the pass, where the update adds up the same: in a mean over rows, verl leaves out those
        # without a trained token, and the update does not.
        by_tokens = self.config.actor_rollout_ref.actor.loss_agg_mode in TOKEN_MODES
        if self._own_old_log_probs and by_tokens and "actor/entropy_loss" in metrics:
            metrics["actor/entropy"] = metrics["actor/entropy_loss"]
        if self._timing is not None:
            started = time.perf_counter()
            timings, of_clocks = self._timing.read()
            update = replace(update, timings=timings)
            metrics.update(of_clocks)
            metrics[names.TIMING_SECONDS] = time.perf_counter() - started
        self._updates.append(update)
        self._trained.append(batch)
        return batch

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict[str, Any], logging_prefix: str = SEQLEN, **_: Any
    ) -> KVBatchMeta:
        """Puts the rows in the order of the data set, plans them, and puts their pads into TransferQueue.

        The rows come in the order in which their sessions ended, which no run repeats.

        Raises:
            PaddingDataError: the rows cannot be planned; none was touched.
        """
        if not self._probed:
            probe_models(self._worker_groups, self._job_reader, batch)
            self._probed = True
        started = time.perf_counter()
        batch.reorder(data_order(batch.keys))
        tokens_R = tokens_of_tags(batch.keys, batch.tags)
        plan, template = self._plan(batch, tokens_R, metrics)
        planned = time.perf_counter()
        padded = self._padded(batch, plan, template, timed=self._timing is not None)
        if self._job_reader.has_teacher:
            padded.check_all_rows_have("teacher_logprobs")
        if self._own_old_log_probs and self.config.algorithm.get("rollout_correction") is not None:
            padded.check_no_row_has(
                "rollout_log_probs",
                "verl's trainer compares it with old log-probs, of which there are none with "
                "padding.old_log_probs=update. Have the agent loop return none, or set "
                "algorithm.rollout_correction=null",
            )
        # Set before the pads are put: whatever interrupts the step from here on, they are taken out again.
        self._padded_batch = padded
        padded.put_pads()
        metrics[names.PLAN_SECONDS] = planned - started
        metrics[names.UPSAMPLE_SECONDS] = time.perf_counter() - planned
        metrics.update(self._plan_metrics(padded, logging_prefix))
        return batch

    def _plan_metrics(self, padded: PaddedBatch, logging_prefix: str = SEQLEN) -> dict[str, float]:
        found: dict[str, float] = {}
        if self._padding.idle_rows == "skip" and ACTOR in padded.plan.layouts:
            logging_prefix += "_computed"  # verl's are of all rows
            found[names.LEFT_OUT_ROWS.format(update=ACTOR)] = 0
        made = padded.carried_out, tokens_of_tags(padded.batch.keys, padded.batch.tags), padded.pad_length
        return found | step_metrics.plan_metrics(*made) | step_metrics.rank_token_metrics(*made, logging_prefix)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self._own_old_log_probs:
            return batch
        return super()._compute_old_log_prob(batch, metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        computed = super()._compute_ref_log_prob(batch, metrics)
        # verl leaves it there, for the critic's pass, which comes next: a LoRA critic would run without its adapter,
        # another one has no adapter to turn off, and the clock would take the critic's pass for the reference's.
        computed.extra_info.pop(NO_ADAPTER, None)
        return computed

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        computed = super()._compute_advantage(batch, metrics)
        if self._padding.advantages == "session":
            advantages.compute_session_advantages(batch, self.config.algorithm, images=self._job_reader.has_images)
        else:
            advantages.repair_untrained_ends(batch, self.config.algorithm)
        return computed

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        n_gpus = self._get_n_gpus_for_throughput()
        metrics.update(step_metrics.performance_metrics(metrics, len(batch), self._pad_tags, timing_raw, n_gpus))
        # Of all local updates of the step: verl weighs what each of them logs by its rows.
        started = time.perf_counter()
        rows_of = [
            TrainedRows.read(update.batch, update.mask_R, compare=self._padding.record) for update in self._updates
        ]
        metrics.update(batch_metrics.row_metrics(rows_of, self.config.algorithm))
        metrics.update(self._session_counts.metrics(batch.keys))
        if self.extends != SYNC:
            metrics.update(batch_metrics.age_metrics(rows_of, global_steps))
        self._record.write(global_steps, self._updates, rows_of)
        metrics[names.ROWS_SECONDS] = time.perf_counter() - started

    def _save_checkpoint(self) -> None:
        # verl clears a step's rows after it has saved: its snapshot of TransferQueue would bring rows that the saved
        # weights have been trained on back into a resumed run. Its metrics and its dump still need them afterwards.
        # Outside of verl's loop they may be gone by now; inside of a step its pads are there.
        batches = list(self._trained)
        if self._padded_batch is not None:
            batches += [self._padded_batch.batch, self._padded_batch.pads]
        with set_aside(batches if self.trainer_mode != SYNC else []):
            super()._save_checkpoint()

    def _idle_steps(self, padded: PaddedBatch) -> dict[str, float]:
        layouts = padded.plan.layouts
        idle = {call: padded.idle_steps(call) for call in layouts if CALL_BY_NAME[call].trains}
        if any(idle.values()) and not self._warned_of_idle_steps:
            self._warned_of_idle_steps = True
            of = {call: counted(layouts[call].n_mini_batches, "optimizer step") for call in layouts}
            logger.warning(
                "verl_padding: step %d: no row has a trained token (response_mask) in %s. The gradients are 0 there, "
                "and momentum alone moves the weights. %s counts such steps.",
                self.global_steps,
                " and ".join(f"{n} of {of[call]} of {call!r}" for call, n in idle.items() if n),
                names.IDLE_STEPS,
            )
        return {names.IDLE_STEPS.format(update=call): n for call, n in idle.items()}
