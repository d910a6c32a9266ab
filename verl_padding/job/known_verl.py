"""The versions of verl that this code was checked against. A new one is let in here and in
setup.cfg, nowhere else.

What to run first with a new version of verl: ``pytest tests/worker tests/prefix_sharing
tests/driver`` (what is replaced or overridden in verl is still there), ``tests/verl_fixes
tests/on_cpu`` (the same, or it can go), then ``tests/job tests/equivalence`` (engines, estimators,
losses), then ``tests/end_to_end``. docs/how_it_works.md lists the modules that replace something
("Where verl is touched").
"""

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
