"""The versions of verl that this code was checked against. A new one is let in here and in
setup.cfg, nowhere else.

What to run first with a new version of verl: ``pytest tests/worker tests/on_cpu`` (what is replaced
in verl is still there, or can go), then ``tests/job tests/equivalence`` (engines, estimators,
losses), then ``tests/end_to_end``.
"""

from functools import cache
from pathlib import Path

from verl_padding.errors import PaddingConfigError
from verl_padding.job.blocker import Blocker

KNOWN_VERL = "0.9.x"
"""Versions of verl whose inner functions are known."""


def is_known(version: str) -> bool:
    """Whether the inner functions of this version of verl may be replaced."""
    return version.startswith(KNOWN_VERL.removesuffix("x"))


def unknown_verl() -> Blocker | None:
    """What keeps inner functions of this verl from being replaced."""
    import verl

    if is_known(verl.__version__):
        return None
    why = f"the plan's packer replaces a function of verl {KNOWN_VERL}"
    return Blocker(f"verl=={verl.__version__}", why, "Set padding.packer=verl.")


@cache
def check_verl_is_known() -> None:
    """Refuses what later versions of verl may bring and would go wrong in silence. Session keys of
    another form need no look here: the planner refuses each row of another form."""
    import verl

    folder = Path(verl.__file__).parent
    found = dict.fromkeys(
        folder.rglob("*data_plane*"), "sends rows to its workers by a data plane, without pads"
    )
    for path in folder.glob("trainer/ppo/*.py"):
        if "loss_weight" in path.read_text(encoding="utf-8"):
            found[path] = (
                "reads our field 'loss_weight' in its losses, so that a row would weigh twice"
            )
    for path, why in found.items():
        why += f" ({path.relative_to(folder).as_posix()})"
        raise PaddingConfigError(
            f"padding=..: this verl {why}. Install verl {KNOWN_VERL}, or leave padding out."
        )
