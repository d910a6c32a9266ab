"""Keys of a job that nobody reads, and values that are not of the kind that verl has there.

Hydra takes any key behind a +, so a flag that is misspelt changes nothing, in silence.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, warning, wrong
from verl_padding.job.misspelt_flag import FLAG, meant_by

TOOLS = "actor_rollout_ref.rollout.multi_turn."
"""A section whose tools verl loads whether it is enabled or not."""
KINDS = {bool: "true or false", int: "a number", float: "a number"}
"""Type of a value in verl's own config -> what a job's has to be."""


def leaves(config: DictConfig, above: str = "") -> Iterator[tuple[str, Any]]:
    """Full key and value of each setting, MISSING for one that has to be given; none of a section
    that is switched off."""
    if config.get("enable", config.get("enabled")) is False and above != TOOLS:
        return
    for name in map(str, config):
        key = f"{above}{name}"
        if str(config._get_node(name)).startswith("${oc.select:"):
            continue  # another setting's value, which has its own key
        if OmegaConf.is_missing(config, name):
            yield key, MISSING
        elif isinstance(value := config[name], DictConfig):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def unread_keys(config: DictConfig, verls: DictConfig, above: str = "") -> Iterator[Finding]:
    """Names keys that are not in verl's own config and that its code does not read: at the top, all
    of them; below, those that are nearly one that is."""
    names = list(map(str, verls))
    for name in map(str, config):
        key = f"{above}{name}"
        value = None if OmegaConf.is_missing(config, name) else config[name]
        if name in names:
            own = None if OmegaConf.is_missing(verls, name) else verls[name]
            if isinstance(value, DictConfig) and isinstance(own, DictConfig):
                yield from unread_keys(value, own, f"{key}.")
        elif key != FLAG:
            meant = None if above else meant_by(key, value)
            if meant is None and _is_read(name, at_the_top=not above):
                continue
            if close := get_close_matches(name, names, n=1, cutoff=0.8):
                meant = meant or above + close[0]
            why = f"{value}: neither verl nor verl_padding reads this key"
            if meant:
                yield wrong(key, f"{why}. Did you mean {meant}?")
            elif not above:
                yield warning(key, f"{why}. Leave it out, unless your own code reads it.")


def values_of_other_kinds(config: DictConfig, verls: DictConfig) -> Iterator[Finding]:
    """Texts where verl has a number, or a truth value: ``no`` is a text to Hydra, and true to
    Python."""
    own = dict(leaves(verls))
    for key, value in leaves(config):
        kind = KINDS.get(type(own.get(key)))
        if kind and isinstance(value, str):
            yield wrong(key, f"{value}: a text, where verl has {own[key]}. Set it to {kind}.")


def _is_read(name: str, *, at_the_top: bool) -> bool:
    before = r"config\.(?:get\([\"'])?" if at_the_top else r"[.\"']"
    return re.search(rf"{before}{re.escape(name)}\b", verls_code()) is not None


@cache
def verls_code() -> str:
    """All that verl's modules say."""
    verl = find_spec("verl")
    assert verl is not None
    assert verl.origin is not None
    return "\n".join(file.read_text() for file in Path(verl.origin).parent.rglob("*.py"))
