"""One seed for all that a job on a CPU draws."""

from __future__ import annotations


def seed_overrides(seed: int) -> list[str]:
    """Overrides of a verl job: the order of the data, the rollout, verl's own cut of mini-batches.

    ``+local=cpu`` seeds the actor's engine as the rollout. Weights, data and ``padding.seed`` are the
    caller's: not every job has them to seed.
    """
    return [
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"actor_rollout_ref.actor.data_loader_seed={seed}",
    ]
