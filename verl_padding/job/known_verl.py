"""The versions of verl that this code was checked against. A new one is let in here and in setup.cfg, nowhere else.

What to look at first when verl has a new version:

* ``pytest tests/worker tests/local``: what is replaced in verl is still there; tests/worker also say when it can go.
* ``pytest tests/equivalence tests/worker/test_losses.py``: estimators and losses, as verl registers them; whether verl
  weighs rows by itself, by the field that is read here.
* ``job/pad_length.py`` and ``job/role_engine.py``: what engines round up and how they share out ranks.
* ``pytest tests/end_to_end``: whole jobs.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from verl_padding.errors import PaddingConfigError

KNOWN = ("0.9",)
"""Versions of verl whose inner functions are known."""
KNOWN_VERL = " or ".join(f"{version}.x" for version in KNOWN)
"""The same, for messages."""

LOSSES = "trainer/ppo/*.py"
"""Files of verl's losses, below its folder."""
WEIGHT = "loss_weight"
"""Our field for what a row weighs."""

PRIMARY = "ppo_trainer"
"""The config that verl.trainer.main_ppo starts from, unless ``--config-name`` says otherwise."""


def is_known(version: str) -> bool:
    """Whether this is a version of verl whose inner functions may be replaced."""
    return version.startswith(tuple(f"{known}." for known in KNOWN))


@cache
def refuse_unknown_verl() -> None:
    """Looks for what later versions of verl may bring and what would go wrong in silence.

    Session keys of another form need no look here: the planner refuses each row of another form.

    Raises:
        PaddingConfigError: verl weighs rows by itself, or sends them to workers past TransferQueue.
    """
    spec = find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    verl = Path(spec.origin).parent
    if planes := sorted(path.relative_to(verl).as_posix() for path in verl.rglob("*data_plane*")):
        raise PaddingConfigError(
            f"padding=..: this verl sends rows to its workers by a data plane of its own ({planes[0]}), where no pad "
            f"would be sent along. Install verl {KNOWN_VERL} before it, or leave padding out."
        )
    for file in sorted(verl.glob(LOSSES)):
        if WEIGHT in file.read_text(encoding="utf-8"):
            raise PaddingConfigError(
                f"padding=..: the losses of this verl read {WEIGHT!r} ({file.relative_to(verl)}), so a row would weigh "
                f"twice. Install verl {KNOWN_VERL} before it, or leave padding out."
            )
