"""The real rows of a batch, as the planner sees them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from verl_padding.errors import PlanError
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import parts_of_key

MAX_TOKENS = 1 << 26
"""Most tokens that a row may have: beyond every model's context, yet their square is a cost that
fits int64."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The real rows of a batch: column by column, one entry per row, in the order of the batch."""

    key_R: tuple[str, ...]
    """Name of each row; no two are alike."""
    prompt_R: tuple[str, ...]
    """Prompt (``uid``) that each row answers."""
    tokens_R: tuple[int, ...]
    """Tokens of prompt and response together."""
    tries: PrefixTries | None = None
    """The rows' common prefixes, as far as an engine may compute them once; None if unknown."""
    zero_advantage: tuple[int, ...] = ()
    """Numbers of rows that add nothing to the gradient of an update with ``drops_zero_advantage``.
    If a mini-batch has only such rows, the first one here is computed."""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for key, tokens, _ in zip(self.key_R, self.tokens_R, self.prompt_R, strict=True):
            if key in seen:
                raise PlanError(f"row {key!r} is in the batch twice: every key must be there once")
            seen.add(key)
            if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
                raise PlanError(
                    f"row {key!r} has {tokens!r} tokens: a whole number from 1 to {MAX_TOKENS} is "
                    "needed"
                )
        assert set(self.zero_advantage) <= set(range(len(self))), "rows of the batch"

    def __len__(self) -> int:
        return len(self.key_R)

    @classmethod
    def from_keys(
        cls,
        keys: Iterable[str],
        tokens: Iterable[int | np.integer],
        tries: PrefixTries | None = None,
        zero_advantage: Iterable[int] = (),
    ) -> Rows:
        """Reads prompts from keys of the form ``{uid}_{session}_{index}``.

        Args:
            tokens: tokens of each row: Python's integers or NumPy's.
            tries: see ``tries``.
            zero_advantage: see ``zero_advantage``.

        >>> Rows.from_keys(["math_7_0_1"], [512]).prompt_R
        ('math_7',)

        Raises:
            PlanError: a key has another form or comes twice, or a number of tokens is not whole,
                below 1 or beyond ``MAX_TOKENS``.
        """
        key_R = tuple(keys)
        prompt_R = []
        for key in key_R:
            if (parts := parts_of_key(key)) is None:
                raise PlanError(
                    f"row {key!r}: not of the form {{uid}}_{{session}}_{{index}}, where session "
                    "and index are whole numbers from 0"
                )
            prompt_R.append(parts[0])
        return cls(
            key_R=key_R,
            prompt_R=tuple(prompt_R),
            # Anything but a whole number is refused with its key.
            tokens_R=tuple(int(n) if isinstance(n, np.integer) else n for n in tokens),
            tries=tries,
            zero_advantage=tuple(zero_advantage),
        )
