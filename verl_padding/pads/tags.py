"""How a pad is told from a real row: by its tag in TransferQueue, and by its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PADDING_TAG = "is_padding"
"""Tag of a pad row; verl 0.9 uses the same."""

PAD_UID_PREFIX = "pad"
"""First letters of a pad's uid, and so of its key; verl 0.9 uses the same. verl's own uids are hexadecimal."""


def is_padding(tag: Mapping[str, Any]) -> bool:
    """Whether a row with this tag is a pad."""
    return bool(tag.get(PADDING_TAG, False))
