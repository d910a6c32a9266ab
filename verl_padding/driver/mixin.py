"""What makes one of verl's trainers a padded one."""

import logging
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from verl.utils.tensordict_utils import assign_non_tensor_stack

from verl_padding.driver.called_methods import CalledMethods, tracked
from verl_padding.driver.group_filter import filter_groups_by_sessions
from verl_padding.driver.job_check import check_job
from verl_padding.driver.samples import compute_advantages
from verl_padding.driver.training_steps import TRAIN, TrainingSteps
from verl_padding.job.attention import use_torch_attention
from verl_padding.job.verl_check import untried_verl
from verl_padding.job.verl_job import VerlJob
from verl_padding.pads.prompt_order import PromptNames
from verl_padding.pads.queue import KVBatchMeta, clear_leftovers

if TYPE_CHECKING:
    from verl.trainer.ppo.v1 import PPOTrainer as VerlTrainer
else:
    VerlTrainer = object  # a mixin: one of verl's trainers comes behind it

logger = logging.getLogger(__name__)


def prepare_job(config: DictConfig) -> VerlJob:
    """Checks a job, and puts into its config what verl reads from there later."""
    use_torch_attention(config)
    job = check_job(config)
    if untried := untried_verl():
        logger.warning("verl_padding: %s", untried)
    agent = config.actor_rollout_ref.rollout.agent
    if not agent.get("agent_loop_manager_class"):
        with open_dict(agent):
            agent.agent_loop_manager_class = (
                "verl_padding.driver.agent_loops.PaddedAgentLoopManager"
            )
    # verl compares the name of the mode with its own and looks up sections of the config by it.
    config.trainer.v1.trainer_mode = job.mode
    return job


class PaddedTrainer(VerlTrainer):
    """Mixin before one of verl's v1 trainers: plans each batch and pads its worker calls.

    The batch that verl's methods pass around holds real rows only, from sampling to the rollout
    dump. Pads are in TransferQueue from :meth:`_balance_batch` to the end of :meth:`_step_once`,
    and only the worker groups, which :class:`~verl_padding.driver.training_steps.TrainingSteps`
    wraps, send them to workers.
    """

    extends: ClassVar[str]
    """verl's trainer mode that this trainer extends."""

    steps: TrainingSteps
    """The job's steps, after setup."""

    def __init__(self, config: DictConfig):
        self.called_methods = CalledMethods(self)
        self._job = prepare_job(config)
        self._prompt_names = PromptNames()
        super().__init__(config)

    @tracked
    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self._job.check_models()  # the model is at hand now, and no worker has started

    @tracked
    def _build_replay_buffer(self) -> Any:
        by_role = self._job.padding.baseline == "role"
        return filter_groups_by_sessions(super()._build_replay_buffer(), by_role=by_role)

    def _setup(self) -> None:
        super()._setup()
        clear_leftovers(TRAIN)
        self.steps = TrainingSteps(self, self._job)

    @tracked
    def fit(self, agent_loop_manager: Any) -> None:
        before = self.global_steps
        super().fit(agent_loop_manager)
        # verl counts one more where it has trained nothing.
        if self.global_steps > before + 1:
            self.called_methods.check_metrics_ran()
        self.steps.log_savings()

    @tracked
    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        self.steps.start()
        return super().step(metrics, timing_raw)

    @tracked
    def _fetch_one_gen_batch(self) -> TensorDict:
        """verl's next prompts from the data loader, under uids that tell their order."""
        batch = super()._fetch_one_gen_batch()
        assign_non_tensor_stack(
            batch, "uid", self._prompt_names.next(self.global_steps, len(batch))
        )
        return batch

    @tracked
    def _step_once(
        self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int
    ) -> KVBatchMeta:
        with self.steps.local_update(metrics):
            batch = super()._step_once(metrics, timing_raw, sample_batch_size)
            self.called_methods.end_local_update()
            self.steps.hide_rows_without_loss(batch)
            return batch

    @tracked
    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> KVBatchMeta:
        # Replaces verl's balancing; what verl logs of it is in PlannedUpdate.metrics.
        self.steps.plan_and_put_pads(batch, metrics)
        return batch

    @tracked
    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self._job.skips_old_log_probs:
            return batch
        return super()._compute_old_log_prob(batch, metrics)

    @tracked
    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        by_verl = super()._compute_advantage
        return compute_advantages(batch, metrics, by_verl, self._job, self.steps.current)

    @tracked
    def _compute_metrics(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.called_methods.end_step(checkpointed="save_checkpoint" in timing_raw)
        super()._compute_metrics(batch, metrics, timing_raw, *args, **kwargs)
        self.steps.compute_metrics(metrics, timing_raw)

    @tracked
    def _save_checkpoint(self) -> None:
        with self.steps.rows_set_aside():
            super()._save_checkpoint()
