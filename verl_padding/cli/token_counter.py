"""Counts a text's tokens with a tokenizer of Hugging Face, from a folder, the hub's cache or the hub."""

from __future__ import annotations

from verl_padding.cli.rows_file import CountTokens
from verl_padding.errors import PaddingDataError


def token_counter(tokenizer: str | None) -> CountTokens | None:
    """
    Args:
        tokenizer: a folder, or a name on the hub; None for none.

    Raises:
        PaddingDataError: there is no such tokenizer here, nor on the hub.
    """
    if tokenizer is None:
        return None
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise PaddingDataError(
            f"--tokenizer {tokenizer}: cannot be read ({first_line(error)}). Name the model's folder."
        ) from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False))


def first_line(error: Exception) -> str:
    """What an error of a library says, in a line."""
    return str(error).split("\n", 1)[0]
