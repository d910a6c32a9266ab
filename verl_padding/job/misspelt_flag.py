"""A flag of the plug-in that is misspelt, or is of an older version: Hydra takes ``+paddng=fast``
for a new key, and verl would silently train without padding."""

from difflib import SequenceMatcher
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import refuse
from verl_padding.job.modes import MODE

FLAG = "padding"
ALIKE = 0.85
"""Likeness of a name to the flag that is a slip: a letter left out, doubled or swapped with the
next one has it, ``my_padding`` has not."""


def meant_by(name: str, value: Any) -> str | None:
    """What a key stands for whose name is nearly the flag's, or the flag's; None if it is not."""
    if SequenceMatcher(None, name.lower().removeprefix("verl_"), FLAG).ratio() < ALIKE:
        return None
    return f"+{FLAG}={value}" if isinstance(value, str) else FLAG


def refuse_misspelt_flag(config: DictConfig) -> None:
    """Refuses a config with such a key, which changes nothing, or with the mode of a padded
    trainer."""
    for key, value in config.items():
        if key != FLAG and (meant := meant_by(str(key), value)):
            why = "neither verl nor verl_padding reads this key"
            refuse(f"+{key!s}={value}", why, f"Did you mean {meant}?")
    mode = str(OmegaConf.select(config, MODE))
    if (verls := mode.removeprefix("padded_")) != mode:
        why = "padding is requested by a flag, not by a mode"
        refuse(f"{MODE}={mode}", why, f"Set {MODE}={verls} +{FLAG}=fast.")
