"""What is repaired in verl's trainers: they forget a flag of the reference's pass."""

from typing import TYPE_CHECKING, Any

from verl_padding.pads.padded_batch import NO_ADAPTER
from verl_padding.pads.queue import KVBatchMeta

if TYPE_CHECKING:
    from verl.trainer.ppo.v1 import PPOTrainer as VerlTrainer
else:
    VerlTrainer = object  # a mixin: one of verl's trainers comes behind it


class RepairedTrainer(VerlTrainer):
    """Mixin before one of verl's v1 trainers."""

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        computed = super()._compute_ref_log_prob(batch, metrics)
        # Where a LoRA actor is its own reference, verl turns its adapter off by this flag, and
        # leaves the flag in the batch. The critic's pass, which comes next, would read it: a LoRA
        # critic would compute values without its adapter, with no word in the log.
        computed.extra_info.pop(NO_ADAPTER, None)
        return computed
