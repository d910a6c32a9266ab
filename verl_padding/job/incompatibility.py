"""What keeps a job from having a saving, or from running at all."""

from dataclasses import dataclass
from typing import NoReturn

from verl_padding.errors import PaddingConfigError


@dataclass(frozen=True)
class Incompatibility:
    """Why a job cannot have a saving."""

    setting: str
    """With its value: ``actor_rollout_ref.actor.use_kl_loss=True``."""
    why: str
    fix: str
    """What would have to change, as a sentence."""

    def __str__(self) -> str:
        return f"{self.setting}: {self.why}. {self.fix}"


def refuse(setting: str, why: str, fix: str) -> NoReturn:
    """Refuses a job, by a setting with its value, with a PaddingConfigError."""
    raise PaddingConfigError(f"{setting}: {why}. {fix}")
