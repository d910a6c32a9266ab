"""Keys of a job that nobody reads, and values that are not of the kind that verl has there.

Hydra takes any key behind a +, so a flag that is misspelt changes nothing, in silence.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from inspect import getsource
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra.utils import get_class
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from verl_padding.cli.doctor.finding import Finding, warning, wrong
from verl_padding.config import PaddingConfig
from verl_padding.job.composition import settings_of
from verl_padding.job.misspelt_flag import FLAG, meant_by

TARGET = "_target_"
TOOLS = "actor_rollout_ref.rollout.multi_turn"
"""A section whose tools verl loads whether it is enabled or not."""
SETTINGS = PaddingConfig.__dataclass_fields__
KINDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}
"""Type of a value in verl -> what a job's has to be."""


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
    """Names keys that are not in verl's own config and that its code does not read: at the top, and
    in sections that have a class of verl's, all of them; elsewhere, those that are nearly one."""
    sections = dict(settings_of(_plain(verls))) | {"": _plain(verls)}
    for key, value in settings_of(_plain(config)):
        above, _, name = key.rpartition(".")
        beside = sections.get(above)
        if key in sections or key == FLAG or not isinstance(beside, dict):
            continue
        # A section that is empty in verl's config is of other libraries' arguments.
        flag = meant_by(name, value) if beside else None
        ours = [f"{FLAG}.{key}"] if key in SETTINGS else []
        target = beside.get(TARGET)
        is_read = _is_read(name, at_the_top=not above) or (target and name in _hints(target))
        if not flag and not ours and is_read:
            continue
        close = ours or get_close_matches(name, beside, n=1, cutoff=0.8)
        why = f"{value}: neither verl nor verl_padding reads this key"
        if flag or (above and close):
            yield wrong(key, f"{why}. Did you mean {flag or f'{above}.{close[0]}'}?")
        elif not above or target:
            fix = f"Did you mean {close[0]}?" if close else "Leave it out."
            yield warning(key, f"{why}, unless your own code does. {fix}")


def ignored_settings(config: DictConfig, verls: DictConfig) -> Iterator[Finding]:
    """Settings that verl's own config has, and that the code outside of their class never reads, if
    the job gives them another value. Engines hand theirs on as a whole."""
    from verl.workers.config import EngineConfig

    sections = dict(settings_of(_plain(verls)))
    for key, value in leaves(config).items():
        above, _, name = key.rpartition(".")
        target, own = sections.get(f"{above}.{TARGET}"), sections.get(key, value)
        # One that follows another is not the job's.
        if not target or name == TARGET or own == value or "${" in str(own):
            continue
        classes = [each for each in get_class(target).__mro__ if each.__module__[:5] == "verl."]
        source = "".join(map(getsource, classes))
        reads = rf"(?:\.|[\"']){name}\b|\b{name}="
        if EngineConfig not in classes and not re.search(reads, source + verls_code(configs=False)):
            yield warning(key, f"{value}: no code of the installed verl reads it. Leave it out.")


def legacy_rewards(config: DictConfig) -> Iterator[Finding]:
    """Settings of the sections that rewards had before, which verl's v1 trainers do not move to
    ``reward``, and thus ignore."""
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    before, moved = leaves(config), migrate_legacy_reward_impl(config.copy())
    after = leaves(moved)
    for key, value in before.items():
        if key.partition(".")[0] not in moved and value is not None:
            now = [each for each in after if after[each] == value != before.get(each)]
            fix = f"Set {now[0]}." if now else "Set it below reward."
            yield wrong(key, f"{value}: verl's v1 trainers do not read this section. {fix}")


def values_of_other_kinds(config: DictConfig, verls: DictConfig) -> Iterator[Finding]:
    """Values of a type that verl does not take there, such as a text in the place of a truth value:
    ``no`` is a text to Hydra, and true to Python."""
    own = dict(settings_of(_plain(verls)))
    for key, value in leaves(config).items():
        if value == (there := OmegaConf.select(verls, key)):
            continue
        types = _types(key, own)
        kinds = [kind for each, kind in KINDS.items() if each in types]
        kind = list if isinstance(value, ListConfig) else type(value)
        # 0 and 1 are truth values, too, and any value has a text.
        fits = kind in types or (isinstance(value, int) and bool(types & {bool, int, float}))
        fits = fits or value == MISSING or (str in types and value is not None)
        if kinds and (not fits or value != value):
            # verl's code may take a null or another number.
            say = wrong if kind is str else warning
            yield say(key, f"{value}: verl's own value is {there}. Set it to {kinds[-1]}.")


def _types(key: str, verls: Mapping[str, Any]) -> frozenset[type]:
    """Types that a value may have: those of verl's class of its section, or else that of verl's own
    value and those of settings with its name in any class of verl's; none where nothing tells."""
    if key not in verls:
        return frozenset()
    section, _, name = key.rpartition(".")
    target = verls.get(f"{section}.{TARGET}")
    if target and name in _hints(target):
        return frozenset(_parts(_hints(target)[name]))
    named = chain.from_iterable(map(_parts, _hints_by_name().get(name, ())))
    return frozenset({type(verls[key]), *named})


@cache
def _hints(target: str) -> dict[str, Any]:
    """Setting -> its type, of verl's class of a section."""
    return get_type_hints(get_class(target))


@cache
def _hints_by_name() -> dict[str, list[Any]]:
    """Setting -> its types, in any of verl's classes of sections."""
    import verl.workers.config  # noqa: F401  (whose modules have the classes)
    from verl.base_config import BaseConfig

    classes: list[type] = [BaseConfig]
    found: dict[str, list[Any]] = {}
    for each in classes:
        classes += each.__subclasses__()
        for name, hint in get_type_hints(each).items():
            found.setdefault(name, []).append(hint)
    return found


def _parts(hint: Any) -> Iterator[type]:
    """``Optional[list[str]]`` -> list, and None's type."""
    for part in get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]:
        origin = get_origin(part) or part
        # YAML has no tuples, and a choice of names is a text.
        yield {tuple: list, Literal: str}.get(origin, origin)


def _is_read(name: str, *, at_the_top: bool) -> bool:
    before = r"config\.(?:get\([\"'])?" if at_the_top else r"[.\"']"
    return re.search(rf"{before}{re.escape(name)}\b", verls_code()) is not None


@cache
def verls_code(*, configs: bool = True) -> str:
    """All that verl's modules say, with or without those of its configs' classes."""
    import verl

    files = Path(verl.__path__[0]).rglob("*.py")
    read = [file for file in files if configs or file.parent.name != "config"]
    return "\n".join(file.read_text() for file in read)
