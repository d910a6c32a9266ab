"""A flag of the plug-in that is misspelt: Hydra takes ``+paddng=fast`` for a new key, and verl
would silently train without padding."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from verl_padding.config import choices_by_setting
from verl_padding.job.blocker import refuse
from verl_padding.plan import STRATEGIES

FLAG = "padding"
GROUPS = ("fast", *STRATEGIES)
"""Values of the flag ``+padding``: the config groups."""


def meant_by(key: str, value: Any) -> str | None:
    """What a key at the top of a config stands for if it is nearly the flag, or has a value of its;
    None if it is neither."""
    name, is_text = key.lower(), isinstance(value, str)
    if get_close_matches(name, [FLAG], cutoff=0.75) or (is_text and value in GROUPS):
        return f"+{FLAG}={value}" if is_text else FLAG
    if is_text and value in choices_by_setting().get(name, ()):
        return f"{FLAG}.{name}={value}"
    return None


def refuse_misspelt_flag(config: Mapping[Any, Any]) -> None:
    """Refuses a config with such a key, which changes nothing, and without the flag."""
    for key, value in config.items():
        if key != FLAG and (meant := meant_by(str(key), value)):
            why = "neither verl nor verl_padding reads this key"
            refuse(f"+{key}={value}", why, f"Did you mean {meant}?")
