"""What the tags of a row say: whether the row is a pad, and how many tokens it has."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from verl_padding.errors import PaddingDataError
from verl_padding.plan import MOST_TOKENS

PADDING_TAG = "is_padding"
"""Tag of a pad row; verl 0.9 uses the same."""

PAD_UID_PREFIX = "pad"
"""First letters of a pad's uid, and so of its key; verl 0.9 uses the same. verl's own uids are hexadecimal."""

LENGTH_TAGS = ("prompt_len", "response_len", "seq_len")
"""Tags with a row's numbers of tokens, as verl's agent loop writes them."""

_FIX = (
    "Tag each row with the numbers of tokens of its fields prompts and responses, and with their sum as seq_len, as "
    "verl's agent loop does (verl/trainer/ppo/v1/agent_loop_tq.py)."
)


def is_padding(tag: Mapping[str, Any]) -> bool:
    """Whether a row with this tag is a pad."""
    return bool(tag.get(PADDING_TAG, False))


def tokens_of_tags(keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokens of each row, by its tag ``seq_len``.

    ``prompt_len`` and ``response_len``, which verl's agent loop writes and nothing of verl reads, may be left out.

    Raises:
        PaddingDataError: a length is missing or not a whole number, lengths do not add up, or a prompt has no token.
    """
    return [_tokens_of_tag(key, tag) for key, tag in zip(keys, tags, strict=True)]


def _tokens_of_tag(key: str, tag: Mapping[str, Any]) -> int:
    if "seq_len" not in tag:
        raise PaddingDataError(f"row {key!r}: no tag seq_len. {_FIX}")
    lengths = {name: _count(key, name, tag[name]) for name in LENGTH_TAGS if name in tag}
    if lengths.get("prompt_len") == 0:
        raise empty_prompt(key)
    if len(lengths) == len(LENGTH_TAGS) and lengths["prompt_len"] + lengths["response_len"] != lengths["seq_len"]:
        told = ", ".join(f"{name}={tag[name]!r}" for name in LENGTH_TAGS)
        raise PaddingDataError(f"row {key!r}: tags {told}, which do not add up. {_FIX}")
    return lengths["seq_len"]


def refuse_other_lengths(key: str, tag: Mapping[str, Any], prompt: int, response: int) -> None:
    """Compares a row's tags with the tokens of its fields.

    Raises:
        PaddingDataError: a tag says something else, or the prompt has no token.
    """
    if prompt == 0:
        raise empty_prompt(key)
    for name, tokens in zip(LENGTH_TAGS, (prompt, response, prompt + response), strict=True):
        if name in tag and int(tag[name]) != tokens:
            raise PaddingDataError(
                f"row {key!r}: tag {name}={tag[name]!r}, but its fields have {prompt} prompt and {response} response "
                f"tokens. {_FIX}"
            )


def empty_prompt(key: str) -> PaddingDataError:
    """The refusal of a row whose prompt has no token, at which verl's workers stop."""
    return PaddingDataError(
        f"row {key!r}: prompt_len=0. verl takes the log-prob of the first response token from the last token of the "
        "prompt: put a token there, a begin-of-sequence token or whatever the model starts with."
    )


def _count(key: str, name: str, value: Any) -> int:
    least = 1 if name == "seq_len" else 0
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or not least <= count <= MOST_TOKENS:
        raise PaddingDataError(
            f"row {key!r}: tag {name}={value!r}, but a whole number of tokens from {least} to {MOST_TOKENS} is needed. "
            f"{_FIX}"
        )
    return count
