"""The versions of verl that this code was checked against. A new one is let in here and in setup.cfg, nowhere else.

What to look at first when verl has a new version:

* ``pytest tests/worker tests/local``: what is replaced in verl is still there; tests/worker also say when it can go.
* ``pytest tests/equivalence tests/worker/test_losses.py``: estimators and losses, as verl registers them; whether verl
  weighs rows by itself, by the field that is read here.
* ``job/pad_length.py`` and ``job/role_engine.py``: what engines round up and how they share out ranks.
* ``pytest tests/end_to_end``: whole jobs.
"""

KNOWN = ("0.9",)
"""Versions of verl whose inner functions are known."""
KNOWN_VERL = " or ".join(f"{version}.x" for version in KNOWN)
"""The same, for messages."""

PRIMARY = "ppo_trainer"
"""The config that verl.trainer.main_ppo starts from, unless ``--config-name`` says otherwise."""


def is_known(version: str) -> bool:
    """Whether this is a version of verl whose inner functions may be replaced."""
    return version.startswith(tuple(f"{known}." for known in KNOWN))
