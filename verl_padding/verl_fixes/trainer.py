"""What is repaired in verl's trainers: they watch their actors, and forget a flag of the
reference's pass."""

from typing import TYPE_CHECKING, Any

from verl_padding.pads.columns import NO_ADAPTER
from verl_padding.pads.queue import KVBatchMeta, actors_of_queue
from verl_padding.verl_fixes.actor_watch import ActorWatch, actors_of

if TYPE_CHECKING:
    from verl.trainer.ppo.v1 import PPOTrainer as VerlTrainer
else:
    VerlTrainer = object  # a mixin: one of verl's trainers comes behind it


class RepairedTrainer(VerlTrainer):
    """Mixin before one of verl's v1 trainers."""

    lost_actor: str | None = None
    """The actor that has died, in words; the job ends for it."""

    def fit(self, agent_loop_manager: Any) -> None:
        queue = actors_of_queue()
        watch = ActorWatch(lambda: actors_of(self) | queue, on_loss=self._lose)
        with watch.interrupting_main_thread():
            super().fit(agent_loop_manager)

    def _lose(self, actor: str) -> None:
        self.lost_actor = actor

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        computed = super()._compute_ref_log_prob(batch, metrics)
        # Where a LoRA actor is its own reference, verl turns its adapter off by this flag, and
        # leaves the flag in the batch. The critic's pass, which comes next, would read it: a LoRA
        # critic would compute values without its adapter, with no word in the log.
        computed.extra_info.pop(NO_ADAPTER, None)
        return computed
