"""What the tags of a row say: whether the row is a pad, and how many tokens it has."""

import operator
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

from verl_padding.errors import PaddingDataError

PADDING_TAG = "is_padding"
"""Tag of a pad row; verl 0.9 uses the same."""
PAD_UID_PREFIX = "pad"
"""First letters of a pad's uid, and so of its key; verl 0.9 uses the same. verl's own uids are
hexadecimal."""
LENGTH_TAGS = ("prompt_len", "response_len", "seq_len")
"""Tags with a row's numbers of tokens, as verl's agent loop writes them."""


def is_padding(tag: Mapping[str, Any]) -> bool:
    """Whether a row with this tag is a pad."""
    return bool(tag.get(PADDING_TAG, False))


def check_no_pads(names: Iterable[str | int], is_pad_R: Iterable[object]) -> None:
    """Refuses rows of which one is marked as a pad, with a PaddingDataError that names it."""
    if pads := [*compress(names, is_pad_R)]:
        raise PaddingDataError(
            f"row {pads[0]!r}: tagged {PADDING_TAG}=True, or marked so by a column, before any pad "
            "was made. Clear it, or remove the mark."
        )


def tokens_of_tags(tags: Iterable[Mapping[str, Any]]) -> list[int]:
    """Tokens of each row."""
    return [operator.index(tag["seq_len"]) for tag in tags]
