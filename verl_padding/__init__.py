"""Exact and balanced training of multi-trajectory agents with verl, on batches of any size.

For your own trainer: :func:`upsample` appends pads to a batch, :func:`strip` takes them out,
:func:`real_rows` selects the other rows, and :func:`plan_batch` plans which row goes where. They
are imported when first used.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_padding.version import __version__ as __version__

if TYPE_CHECKING:
    from verl_padding.pads.upsampling import real_rows, strip, upsample
    from verl_padding.plan import plan_batch

__all__ = ["__version__", "plan_batch", "real_rows", "strip", "upsample"]

# An installed copy has configs and recipes in it, a checkout beside it. Without them, Python would
# take those of the checkout that pip has installed: two trees in one process.
_HERE = Path(__file__).parent
_BESIDE = [_HERE.parent / name for name in ("configs", "recipes")]
if not (_HERE / "configs").is_dir():
    if all(folder.is_dir() for folder in _BESIDE):
        __path__.append(str(_HERE.parent))
    else:
        sys.modules |= {f"{__name__}.{folder.name}": None for folder in _BESIDE}  # type: ignore


def __getattr__(name: str) -> Any:
    # verl imports this package in every process, mostly for nothing but its hooks: the verbs bring
    # torch and verl.
    if name in __all__:
        home = "plan" if name == "plan_batch" else "pads.upsampling"
        return getattr(import_module(f"verl_padding.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
