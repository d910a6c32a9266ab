"""A padding section beside one of verl's own trainers is refused: it would be ignored without a word.

That happens where Hydra's callback does not run (a config composed by a program, with a stock trainer_mode) or where
the config group was not found, so that ``padding`` is the plain string "prompt". The trainer's constructor is the last
place before workers start, and the first where both config and trainer are known; verl has no hook there, so the
constructor is wrapped.
"""

from __future__ import annotations

from typing import Any

from wrapt import wrap_function_wrapper

from verl_padding.errors import PaddingConfigError

MARK = "extends"
"""Attribute that padded trainers alone have. They are not imported here: the guard stands where they cannot be."""


def refuse_padding_in_stock_trainers(base: type) -> None:
    """Wraps the constructor of verl's base trainer; a config without ``padding`` passes through untouched."""
    wrap_function_wrapper(base, "__init__", _construct)


def _construct(construct: Any, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    config = kwargs["config"] if "config" in kwargs else args[0]
    padding = config.get("padding")
    if padding is not None and not hasattr(trainer, MARK):
        mode = config.trainer.v1.trainer_mode
        raise PaddingConfigError(
            f"padding={padding!r}: trainer.v1.trainer_mode={mode!r} is verl's own trainer and would ignore it. Set "
            f"trainer.v1.trainer_mode=padded_{mode}, or leave +padding out; `verl-padding doctor` with the job's "
            "overrides tells more."
        )
    construct(*args, **kwargs)
