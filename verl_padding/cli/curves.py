"""The curves of a run over its steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from omegaconf import DictConfig

from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import ACTOR
from verl_padding.job.metric_names import (
    OPTIMIZER_STEPS,
    PAD_ROWS_TOTAL,
    REAL_ROWS_TOTAL,
    SESSION_SCORE,
)
from verl_padding.job.role_engine import has_critic
from verl_padding.plan import padded_rows
from verl_padding.record.files import as_data_error
from verl_padding.record.run_files import (
    CONFIG,
    ROLLOUTS,
    StepRows,
    dumps_in,
    read_config,
    read_metrics,
    read_step,
)

SESSION_REWARD = "mean reward of a session"
ACTOR_STEPS = OPTIMIZER_STEPS.format(update=ACTOR)
Curves = dict[str, dict[int, float]]
"""Metric -> step -> value, NaN where it is unknown."""


@dataclass(frozen=True, kw_only=True)
class StockRule:
    """How stock verl 0.9 pads: to a multiple of lcm(dp, actor mini-batch, critic mini-batch), in
    rows."""

    dp_size: int
    actor_rows: int
    """Rows of an actor mini-batch: ppo_mini_batch_size x rollout.n."""
    critic_rows: int = 1

    @classmethod
    def from_config(cls, config: DictConfig) -> Self:
        """The rule for a job without model parallelism."""
        n, trainer = int(config.actor_rollout_ref.rollout.n), config.trainer
        return cls(
            dp_size=int(trainer.n_gpus_per_node) * int(trainer.nnodes),
            actor_rows=int(config.actor_rollout_ref.actor.ppo_mini_batch_size) * n,
            critic_rows=int(config.critic.ppo_mini_batch_size) * n if has_critic(config) else 1,
        )

    def padded_rows(self, real_rows: int) -> int:
        """Rows of the batch after verl's padding."""
        return padded_rows(real_rows, self.dp_size, self.actor_rows, self.critic_rows)

    def optimizer_steps(self, real_rows: int) -> int:
        """Optimizer steps of the actor in an epoch."""
        return self.padded_rows(real_rows) // self.actor_rows


@contextmanager
def noted(notes: list[str]) -> Iterator[None]:
    """What is refused of a run is left out, and noted once."""
    try:
        yield
    except PaddingDataError as refusal:
        if (note := f"Left out: {refusal}") not in notes:
            notes.append(note)


def read_curves(folder: Path) -> tuple[Curves, list[str]]:
    """The metrics of a run, and the mean reward of a session at each step.

    Stock verl logs neither pads nor optimizer steps. They follow from its dumps and its config, and
    have the names of a padded run's metrics, so that both are lines of one chart.

    Returns: the curves, and why dumps were left out.
    """
    curves: Curves = {}
    notes: list[str] = []
    metrics = dict(read_metrics(folder))
    for step, data in metrics.items():
        for name, value in data.items():
            curves.setdefault(name, {})[step] = value
    # The logged reward may be unknown, but it is there: then the dump would not help.
    rewards = dict(curves.get(SESSION_SCORE, {}))
    dumped: dict[int, StepRows] = {}
    for path in dumps_in(folder / ROLLOUTS):
        if (step := int(path.stem)) in metrics.keys() - rewards.keys():
            with noted(notes):
                dumped[step] = read_step(path)
    rewards |= {step: rows.reward for step, rows in dumped.items()}
    if rewards:
        curves[SESSION_REWARD] = dict(sorted(rewards.items()))
    # A run of stock verl. Its dumps hold its pads, and its rule says how many steps they make: 100
    # rows with mini-batches of 64 are padded to 128, and take two.
    if dumped and PAD_ROWS_TOTAL not in curves:
        curves[REAL_ROWS_TOTAL] = {step: rows.real for step, rows in dumped.items()}
        curves[PAD_ROWS_TOTAL] = {step: rows.dumped_pads for step, rows in dumped.items()}
        if (path := folder / CONFIG).exists():
            with noted(notes), as_data_error(str(path), "the config of a job", "Move it elsewhere"):
                rule = StockRule.from_config(read_config(path))
                curves[ACTOR_STEPS] = {
                    step: rule.optimizer_steps(rows.real) for step, rows in dumped.items()
                }
    return curves, notes
