"""Keys of a job that nobody reads, and values that are not of the kind that verl has there.

Hydra takes any key behind a +, so a flag that is misspelt changes nothing, in silence.
"""

import math
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from verl_padding.cli.doctor.finding import Finding, warning, wrong
from verl_padding.config import PaddingConfig
from verl_padding.job.composition import settings_of
from verl_padding.job.misspelt_flag import FLAG, meant_by

TOOLS = "actor_rollout_ref.rollout.multi_turn"
"""A section whose tools verl loads whether it is enabled or not."""
SETTINGS = PaddingConfig.__dataclass_fields__
KINDS = {bool: "true or false", int: "a number", float: "a number"}
"""Type of a value in verl's own config -> what a job's has to be."""


def leaves(config: DictConfig) -> dict[str, Any]:
    """Full key and value of each setting, ``???`` for one that has to be given; none of a section
    that is switched off, and none of a key that has another one's value."""
    settings = dict(settings_of(_plain(config)))
    off = [f"{key}." for key, value in settings.items() if _is_off(value) and key != TOOLS]
    return {
        key: OmegaConf.select(config, key) if "${" in str(value) else value
        for key, value in settings.items()
        if not isinstance(value, dict) and not key.startswith(tuple(off))
        if not str(value).startswith("${oc.select:")
    }


def _is_off(section: Any) -> bool:
    return isinstance(section, dict) and section.get("enable", section.get("enabled")) is False


def _plain(config: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(config)
    assert isinstance(plain, dict)
    return plain


def unread_keys(config: DictConfig, verls: DictConfig) -> Iterator[Finding]:
    """Names keys that are not in verl's own config and that its code does not read: at the top, all
    of them; below, those that are nearly one that is."""
    sections = dict(settings_of(_plain(verls))) | {"": _plain(verls)}
    for key, value in settings_of(_plain(config)):
        above, _, name = key.rpartition(".")
        beside = sections.get(above)
        if key in sections or key == FLAG or not isinstance(beside, dict):
            continue
        # A section that is empty in verl's config is of other libraries' arguments.
        flag = meant_by(name, value) if beside else None
        ours = [f"{FLAG}.{key}"] if key in SETTINGS else []
        if not flag and not ours and _is_read(name, at_the_top=not above):
            continue
        close = ours or get_close_matches(name, beside, n=1, cutoff=0.8)
        why = f"{value}: neither verl nor verl_padding reads this key"
        if flag or (above and close):
            yield wrong(key, f"{why}. Did you mean {flag or f'{above}.{close[0]}'}?")
        elif not above:
            fix = f"Did you mean {close[0]}?" if close else "Leave it out."
            yield warning(key, f"{why}, unless your own code does. {fix}")


def values_of_other_kinds(config: DictConfig, verls: DictConfig) -> Iterator[Finding]:
    """Texts, and numbers that are none, where verl has a number or a truth value: ``no`` is a text
    to Hydra, and true to Python."""
    own = leaves(verls)
    for key, value in leaves(config).items():
        kind = KINDS.get(type(own.get(key)))
        is_null = value is None and not _takes_none(key, verls)
        # Some switch a clip off by infinity, but no learning rate is one.
        is_no_rate = isinstance(value, float | int) and not 0 <= value < math.inf
        is_no_rate = is_no_rate and key.endswith((".lr", "_lr"))
        if kind and (isinstance(value, str) or value != value or is_null or is_no_rate):
            yield wrong(key, f"{value}: verl has {own[key]} there. Set it to {kind}.")


def _takes_none(key: str, verls: DictConfig) -> bool:
    """Whether verl's class of a section says that a value may be None."""
    section, _, name = key.rpartition(".")
    target = OmegaConf.select(verls, f"{section}._target_")
    return target is not None and type(None) in get_args(
        get_type_hints(get_class(target)).get(name)
    )


def _is_read(name: str, *, at_the_top: bool) -> bool:
    before = r"config\.(?:get\([\"'])?" if at_the_top else r"[.\"']"
    return re.search(rf"{before}{re.escape(name)}\b", verls_code()) is not None


@cache
def verls_code() -> str:
    """All that verl's modules say."""
    import verl

    return "\n".join(file.read_text() for file in Path(verl.__path__[0]).rglob("*.py"))
