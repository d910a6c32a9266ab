"""The pads and optimizer steps of a run of stock verl, which logs neither: they follow from its
rollout dumps and its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_padding.cli.curves import ACTOR_STEPS, Curves
from verl_padding.job.metric_names import PAD_ROWS_TOTAL, REAL_ROWS_TOTAL
from verl_padding.job.role_engine import has_critic
from verl_padding.plan import padded_rows
from verl_padding.record.run_files import CONFIG, ROLLOUTS, ROW_REWARD, dumps_in, read_step


@dataclass(frozen=True, kw_only=True)
class StockRule:
    """How stock verl 0.9 pads without model parallelism: to a multiple of lcm(dp, actor mini-batch,
    critic mini-batch), in rows."""

    dp_size: int
    actor_rows: int
    """Rows of an actor mini-batch: ppo_mini_batch_size x rollout.n."""
    critic_rows: int = 1

    def padded_rows(self, real_rows: int) -> int:
        """Rows of the batch after verl's padding."""
        return padded_rows(real_rows, self.dp_size, self.actor_rows, self.critic_rows)

    def optimizer_steps(self, real_rows: int) -> int:
        """Optimizer steps of the actor in an epoch."""
        return self.padded_rows(real_rows) // self.actor_rows


def add_stock_counts(curves: Curves, folder: Path) -> None:
    """Adds the counts of a run of stock verl to its curves, by the names of a padded run's, which
    has its own."""
    if PAD_ROWS_TOTAL in curves or not curves:
        return
    config = OmegaConf.load(folder / CONFIG)
    assert isinstance(config, DictConfig)
    n = int(config.actor_rollout_ref.rollout.n)
    rule = StockRule(
        dp_size=int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes),
        actor_rows=int(config.actor_rollout_ref.actor.ppo_mini_batch_size) * n,
        critic_rows=int(config.critic.ppo_mini_batch_size) * n if has_critic(config) else 1,
    )
    # Its dumps hold its pads: 100 rows with mini-batches of 64 are padded to 128, and take two.
    paths = [path for path in dumps_in(folder / ROLLOUTS) if int(path.stem) in curves[ROW_REWARD]]
    dumped = {rows.step: rows for rows in map(read_step, paths)}
    curves[REAL_ROWS_TOTAL] = {step: rows.real for step, rows in dumped.items()}
    curves[PAD_ROWS_TOTAL] = {step: rows.dumped_pads for step, rows in dumped.items()}
    curves[ACTOR_STEPS] = {step: rule.optimizer_steps(each.real) for step, each in dumped.items()}
