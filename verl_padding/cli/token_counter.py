"""Counts a text's tokens with a tokenizer of Hugging Face, from a folder, the hub's cache or the hub."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException

from verl_padding.cli.rows_file import CountTokens
from verl_padding.doctor.models import SECONDS
from verl_padding.errors import PaddingDataError


def token_counter(tokenizer: str | None) -> CountTokens | None:
    """
    Args:
        tokenizer: a folder, or a name on the hub, which is asked once and quickly; None for none.

    Raises:
        PaddingDataError: there is no such tokenizer, or the hub cannot be reached and its cache has none.
    """
    if tokenizer is None:
        return None
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            tokenizer, local_files_only=os.path.isdir(tokenizer) or not _hub_answers(tokenizer)
        )
    except Exception as error:  # tokenizers raises bare Exceptions
        raise PaddingDataError(
            f"--tokenizer {tokenizer}: cannot be read ({first_line(error)}). Name the model's folder."
        ) from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False))


def first_line(error: Exception) -> str:
    """What an error of a library says, in a line."""
    return str(error).split("\n", 1)[0]


def _hub_answers(name: str) -> bool:
    """Whether the hub says anything of a model: of one that cannot be reached, transformers would ask for a minute."""
    from huggingface_hub import constants, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        url = hf_hub_url(name, "tokenizer_config.json")
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SECONDS):
            return True
    except urllib.error.HTTPError as refusal:
        return refusal.code < HTTPStatus.INTERNAL_SERVER_ERROR
    except (OSError, HTTPException, ValueError):
        return False
