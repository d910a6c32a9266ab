"""What keeps a job from having a saving."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Blocker:
    """Why a job cannot have a saving."""

    setting: str
    """With its value: ``actor_rollout_ref.actor.use_kl_loss=True``."""
    why: str
    fix: str
    """What would have to change, as a sentence."""

    def __str__(self) -> str:
        return f"{self.setting}: {self.why}. {self.fix}"
