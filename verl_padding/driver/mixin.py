"""What makes one of verl's trainers a padded one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from verl.utils.seqlen_balancing import log_seqlen_unbalance
from verl.utils.tensordict_utils import assign_non_tensor_stack

from verl_padding.config import MIN_PAD_LENGTH
from verl_padding.driver.actor_watch import ActorWatch, actors_of
from verl_padding.driver.engine_check import check_engines
from verl_padding.driver.mispaired_advantages import check_advantages_stay_with_rows
from verl_padding.driver.session_advantages import compute_session_advantages, repair_untrained_ends
from verl_padding.driver.session_groups import count_sessions
from verl_padding.driver.step_metrics import performance_metrics, plan_metrics, read_session_metrics, worker_metrics
from verl_padding.driver.step_timing import StepTiming
from verl_padding.driver.stock_guard import TakesPadding
from verl_padding.driver.worker_calls import PaddedWorkerGroup, dp_size
from verl_padding.errors import PaddingDataError
from verl_padding.job import metric_names as names
from verl_padding.job.calls import ACTOR, CALLS, WORKER_GROUPS
from verl_padding.job.job_reader import check_job, translate_plan_error
from verl_padding.job.loss_weightings import loss_weightings
from verl_padding.job.modes import SYNC
from verl_padding.pads.columns import NO_ADAPTER
from verl_padding.pads.lineage import find_extensions
from verl_padding.pads.padded_batch import PaddedBatch, strip_after_an_error
from verl_padding.pads.prompt_order import data_order, ordered_uid
from verl_padding.pads.queue import KVBatchMeta, actors_of_queue, clear_leftovers, read_rows, set_aside
from verl_padding.pads.queue_claim import check_queue_owner, claim_queue, release_queue
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.pads.template import PadTemplate, Schema
from verl_padding.pads.upsampling import find_images, strip
from verl_padding.pads.vision_families import image_maker
from verl_padding.plan import BatchPlan, Job, PlanError, Rows, plan_batch
from verl_padding.plan.counted import counted
from verl_padding.worker import micro_batch_clock, plan_packer, vision_fixes
from verl_padding.worker.leak_probe import probe_for_leaks
from verl_padding.worker.losses import wrap_worker_loss

if TYPE_CHECKING:
    from verl.trainer.ppo.v1 import PPOTrainer as VerlTrainer
else:
    VerlTrainer = object  # a mixin: it comes before one of verl's trainers, which brings the base

logger = logging.getLogger(__name__)

TRAIN_PARTITION = "train"
"""verl's name for the part of TransferQueue that training rows are in."""


class PaddedTrainer(TakesPadding, VerlTrainer):
    """Mixin before one of verl's v1 trainers: plans each batch, pads its worker calls, and nothing else.

    The batch that verl's methods pass around holds real rows only, from sampling to the rollout dump. Pads lie in
    TransferQueue from :meth:`_balance_batch` to the end of :meth:`_step_once`, and only the worker groups, which
    :meth:`_setup` wraps, send them along.
    """

    extends: ClassVar[str]
    """The verl mode whose trainer this one extends."""

    def __init__(self, config: DictConfig):
        check_queue_owner()
        self._job_reader = check_job(config, self.extends)
        self._padding = self._job_reader.padding
        check_advantages_stay_with_rows(config)
        self._loss_weightings = loss_weightings(config, self._padding)
        self._padded_batch: PaddedBatch | None = None
        self._trained: list[KVBatchMeta] = []
        self._pad_tags: list[dict[str, Any]] = []  # of the pads that the workers got in the step
        self._watch: ActorWatch | None = None
        self._timing: StepTiming | None = None
        self._schema = Schema(self._padding.fields)
        # verl compares the name of the mode with its own and looks up sections of the config by it.
        config.trainer.v1.trainer_mode = self.extends
        self._warned_of_idle_steps = False
        self._probed = False
        self._fetched = (0, 0)  # step, and prompts fetched in it so far
        super().__init__(config)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self._job_reader.check_models()  # the model is at hand now, and no worker has started

    def _setup(self) -> None:
        claim_queue()
        try:
            super()._setup()
            clear_leftovers(TRAIN_PARTITION)
            self._wrap_workers()
            agent = self.config.actor_rollout_ref.rollout.agent
            if not agent.get("agent_loop_manager_class"):  # verl.trainer.main_ppo makes it next
                with open_dict(agent):
                    agent.agent_loop_manager_class = "verl_padding.driver.agent_loops.PaddedAgentLoopManager"
        except BaseException:
            release_queue()
            raise

    def _build_replay_buffer(self) -> Any:
        return count_sessions(super()._build_replay_buffer())

    def _wrap_workers(self) -> None:
        reader, padding = self._job_reader, self._padding
        planned = {role: engine.config for role, engine in reader.engines.items()}
        changes = [check_engines(planned), wrap_worker_loss(padding.denominator)]
        if reader.has_vision:
            changes.append(vision_fixes.install_in_worker)
        if padding.packer == "plan":
            changes.append(plan_packer.install(padding.sharing))
        if padding.is_timed:
            changes.append(micro_batch_clock.install_in_worker)
        wrapped: dict[int, PaddedWorkerGroup] = {}
        for name in WORKER_GROUPS:
            worker_group = getattr(self, name, None)
            if worker_group is None:
                continue
            number = id(worker_group)  # actor and reference may be one object, and verl asks whether they are
            if number not in wrapped:
                for change in changes:
                    worker_group.execute_with_func_generator(change)
                wrapped[number] = PaddedWorkerGroup(worker_group, lambda: self._padded_batch, self._plan_single_call)
            setattr(self, name, wrapped[number])
        self._worker_groups = list(wrapped.values())
        if padding.is_timed:
            self._timing = StepTiming(self.config, padding, self._worker_groups)
            self._timing.resume(self.global_steps)

    def _fetch_one_gen_batch(self) -> TensorDict:
        """verl's next prompts from the data loader, under uids that tell their order."""
        batch = super()._fetch_one_gen_batch()
        step, fetched = self._fetched
        first = fetched if step == self.global_steps else 0
        self._fetched = (self.global_steps, first + len(batch))
        places = range(first, first + len(batch))
        assign_non_tensor_stack(batch, "uid", [ordered_uid(self.global_steps, place) for place in places])
        return batch

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            queue = actors_of_queue()
            self._watch = ActorWatch(lambda: actors_of(self) | queue)
            with self._watch.over():
                super().fit(agent_loop_manager)
        finally:
            release_queue()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        self._trained, self._pad_tags = [], []
        return super().step(metrics, timing_raw)

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", **_: Any
    ) -> KVBatchMeta:
        """Puts the rows in the order of the data set, plans them, and puts their pads into TransferQueue.

        The rows come in the order in which their sessions ended, which no run repeats.

        Raises:
            PaddingDataError: the rows cannot be planned; none was touched.
        """
        if not self._probed:
            self._probe(batch)
        started = time.perf_counter()
        batch.reorder(data_order(batch.keys))
        tokens_R = tokens_of_tags(batch.keys, batch.tags)
        template = self._template(batch)
        job = self._job_reader.step_job(
            dp_sizes=self._dp_sizes(),
            updates_actor=self.config.trainer.critic_warmup <= self.global_steps,
            seed=self._step_seed(),
            pad_tokens=template.length,
        )
        if self._timing is not None:
            job = self._timing.with_learned_costs(job)
        plan = self._plan(batch, tokens_R, job, metrics)
        planned = time.perf_counter()
        padded = PaddedBatch(
            batch, plan, template, loss_weightings=self._loss_weightings, timed=self._timing is not None
        )
        if self._job_reader.has_teacher:
            padded.check_all_rows_have("teacher_logprobs")
        # Set before the pads are put: whatever interrupts the step from here on, they are taken out again.
        self._padded_batch = padded
        self._padded_batch.put_pads()
        metrics.update(plan_metrics(plan, tokens_R, updates=list(job.updates), pad_length=template.length))
        metrics[names.PLAN_SECONDS] = planned - started
        metrics[names.UPSAMPLE_SECONDS] = time.perf_counter() - planned
        if plan.layouts:  # none while a warm-up trains nothing and no pass runs
            balanced = plan.layouts.get(ACTOR) or next(iter(plan.layouts.values()))
            seqlen_list = [*tokens_R, *[template.length] * balanced.n_pads]
            partitions = np.reshape(balanced.order, (balanced.dp_size, -1)).tolist()
            metrics.update(log_seqlen_unbalance(seqlen_list, partitions, prefix=logging_prefix))
        return batch

    def _probe(self, batch: KVBatchMeta) -> None:
        """Before the first worker call: each model has to keep packed rows apart."""
        engines = self._job_reader.engines
        fixes = {role: f"{engine.model_section}.use_remove_padding=False" for role, engine in engines.items()}
        (row,) = read_rows(batch.keys[:1], batch.partition_id, ["position_ids"])
        multiples = {role: engine.micro_batch_multiple for role, engine in engines.items()}
        axes = row["position_ids"].shape[:-1]
        probe = probe_for_leaks(axes, sharing=self._padding.sharing, fixes=fixes, multiples=multiples)
        for worker_group in self._worker_groups:
            worker_group.execute_with_func_generator(probe)
        self._probed = True

    def _plan(self, batch: KVBatchMeta, tokens_R: Sequence[int], job: Job, metrics: dict[str, Any]) -> BatchPlan:
        extends_R = None
        if self._padding.sharing != "off":
            started = time.perf_counter()
            extends_R = find_extensions(batch, tokens_R, images=self._job_reader.has_images)
            metrics[names.LINEAGE_SECONDS] = time.perf_counter() - started
        try:
            plan = plan_batch(Rows.from_keys(batch.keys, tokens_R, extends_R), job)
        except PlanError as refusal:
            raise PaddingDataError(f"step {self.global_steps}: {translate_plan_error(refusal)}") from refusal
        for warning in plan.warnings:
            logger.warning("verl_padding: step %d: %s", self.global_steps, warning)
        return plan

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

    @contextmanager
    def _plan_single_call(self, call: str, batch: KVBatchMeta) -> Iterator[PaddedBatch]:
        """A plan and pads for one worker call with rows that the step has not planned for it."""
        template = self._template(batch)
        job = self._job_reader.step_job(
            calls=[call], dp_sizes=self._dp_sizes(), seed=self._step_seed(), pad_tokens=template.length
        )
        plan = self._plan(batch, tokens_of_tags(batch.keys, batch.tags), job, {})
        padded = PaddedBatch(batch, plan, template, loss_weightings=self._loss_weightings)
        try:
            padded.put_pads()
            yield padded
            strip(padded.pads)
        except BaseException:
            self._strip_after_an_error(padded)
            raise

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        computed = super()._compute_ref_log_prob(batch, metrics)
        # verl leaves it there, for the critic's pass, which comes next: a LoRA critic would run without its adapter,
        # another one has no adapter to turn off, and the clock would take the critic's pass for the reference's.
        computed.extra_info.pop(NO_ADAPTER, None)
        return computed

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        computed = super()._compute_advantage(batch, metrics)
        if self._padding.advantages == "session":
            compute_session_advantages(batch, self.config.algorithm, images=self._job_reader.has_images)
        else:
            repair_untrained_ends(batch, self.config.algorithm)
        return computed

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        n_gpus = self._get_n_gpus_for_throughput()
        metrics.update(performance_metrics(metrics, len(batch), self._pad_tags, timing_raw, n_gpus))
        # Of all local updates of the step: verl weighs what each of them logs by its rows.
        metrics.update(read_session_metrics(batch))

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        seconds_before = dict(timing_raw)
        try:
            batch = super()._step_once(metrics, timing_raw, sample_batch_size)
            assert self._padded_batch is not None, "a step without a plan"
            self._pad_tags += self._padded_batch.pads.tags
            strip(self._padded_batch.pads)
            planned = self._padded_batch.batch.keys
            metrics.update(self._idle_steps(self._padded_batch))
        except BaseException:
            if self._padded_batch is not None:
                self._strip_after_an_error(self._padded_batch)
            raise
        finally:
            self._padded_batch = None
        metrics.update(worker_metrics(metrics, seconds_before, timing_raw))
        if self._timing is not None:
            started = time.perf_counter()
            metrics.update(self._timing.read(self.global_steps, planned))
            metrics[names.TIMING_SECONDS] = time.perf_counter() - started
        self._trained.append(batch)
        return batch

    def _idle_steps(self, padded: PaddedBatch) -> dict[str, float]:
        layouts = padded.plan.layouts
        idle = {call.name: padded.idle_steps(call.name) for call in CALLS if call.trains and call.name in layouts}
        if any(idle.values()) and not self._warned_of_idle_steps:
            self._warned_of_idle_steps = True
            of_calls = [
                f"{n} of {counted(layouts[call].n_mini_batches, 'optimizer step')} of {call!r}"
                for call, n in idle.items()
                if n
            ]
            logger.warning(
                "verl_padding: step %d: no row has a trained token (response_mask) in %s. The gradients are 0 there, "
                "and momentum alone moves the weights. %s counts such steps.",
                self.global_steps,
                " and ".join(of_calls),
                names.IDLE_STEPS,
            )
        return {names.IDLE_STEPS.format(update=call): n for call, n in idle.items()}

    def _strip_after_an_error(self, padded: PaddedBatch) -> None:
        # After the loss of an actor the job ends, perhaps because the very queue that holds the pads is gone.
        if not (self._watch and self._watch.lost):
            strip_after_an_error(padded)

    def _save_checkpoint(self) -> None:
        # verl clears a step's rows after it has saved: its snapshot of TransferQueue would bring rows that the saved
        # weights have been trained on back into a resumed run. Its metrics and its dump still need them afterwards.
        # Outside of verl's loop they may be gone by now; inside of a step its pads are there.
        batches = list(self._trained)
        if self._padded_batch is not None:
            batches += [self._padded_batch.batch, self._padded_batch.pads]
        if self._timing is not None:  # before verl says that the checkpoint is whole
            self._timing.save(self.global_steps)
        with set_aside(batches if self.trainer_mode != SYNC else []):
            super()._save_checkpoint()

    def _dp_sizes(self) -> dict[str, int]:
        """Data-parallel size of each worker call, as the worker groups have it."""
        calls = [call for call in CALLS if call.role in self._job_reader.engines]
        return {call.name: dp_size(getattr(self, call.worker_group), call.mesh) for call in calls}

    def _step_seed(self) -> int:
        """A seed that differs in each local update, and is the same in a resumed run."""
        parts = [self._padding.seed, self.global_steps, self.local_trigger_step]
        return int(np.random.SeedSequence(parts).generate_state(1)[0])
