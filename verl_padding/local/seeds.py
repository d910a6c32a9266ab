"""One seed for all that a job on a CPU draws."""

from __future__ import annotations


def seed_overrides(seed: int) -> list[str]:
    """Overrides of a verl job: the order of the data, the rollout, verl's own cut of mini-batches.

    ``+local=cpu`` gives the actor's engine the rollout's seed. The caller seeds weights, data and
    ``padding.seed``, since not every job has them.
    """
    return [
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"actor_rollout_ref.actor.data_loader_seed={seed}",
    ]
