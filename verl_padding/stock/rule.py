"""How many rows stock verl pads a batch to, and how many optimizer steps that makes."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from verl_padding.job.roles_of_job import has_critic
from verl_padding.plan import padded_rows


@dataclass(frozen=True, kw_only=True)
class StockRule:
    """How stock verl 0.9 pads: to a multiple of lcm(dp, actor mini-batch, critic mini-batch), in rows."""

    dp_size: int
    actor_rows: int
    """Rows of an actor mini-batch: ppo_mini_batch_size x rollout.n."""
    critic_rows: int = 1

    @classmethod
    def of_config(cls, config: DictConfig) -> StockRule:
        """The rule for a job without model parallelism."""
        n, trainer = config.actor_rollout_ref.rollout.n, config.trainer
        return cls(
            dp_size=trainer.n_gpus_per_node * trainer.nnodes,
            actor_rows=config.actor_rollout_ref.actor.ppo_mini_batch_size * n,
            critic_rows=config.critic.ppo_mini_batch_size * n if has_critic(config) else 1,
        )

    def padded_rows(self, real_rows: int) -> int:
        """verl's ``_get_required_batch_multiple``."""
        return padded_rows(real_rows, self.dp_size, self.actor_rows, self.critic_rows)

    def optimizer_steps(self, real_rows: int) -> int:
        """Optimizer steps of the actor in an epoch."""
        return self.padded_rows(real_rows) // self.actor_rows
