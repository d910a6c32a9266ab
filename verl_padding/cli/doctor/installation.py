"""Whether the plug-in's packages are installed, and verl and Hydra find it.

What verl reports by itself, such as missing GPUs, is left to it; the dry run shows it.
"""

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import distributions, requires
from importlib.util import find_spec

from packaging.requirements import Requirement

from verl_padding.cli.doctor.finding import Finding, ok, warning, wrong

PACKAGE = "verl_padding"
# environment variable: which plug-ins verl loads, auto, none or names
PLUGIN_POLICY = "VERL_USE_EXTERNAL_PLUGINS"


def versions() -> Iterator[Finding]:
    """Versions of Python and of the packages that the plug-in needs."""
    yield ok("Python", platform.python_version())  # pip has refused others
    for requirement in map(Requirement, requires(PACKAGE) or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        installed = next((each.version for each in distributions(name=name)), None)
        if installed and requirement.specifier.contains(installed, prereleases=True):
            yield ok(name, installed)
        else:
            fix = f"pip install '{requirement}'"
            yield wrong(name, f"{installed or 'missing'}, but this is needed: {fix}")


def verl() -> Iterator[Finding]:
    """What the plug-in relies on in the source of the installed verl."""
    if find_spec("verl") is None:
        return  # reported as a version that is missing
    from verl_padding.job.verl_check import missing_facts, untried_verl
    from verl_padding.job.verl_source import installed_verl

    for fact, line in missing_facts(installed_verl()).items():
        if fact.needed_by:
            yield warning("verl", f"{line}. A job that needs it is refused ({fact.needed_by}).")
        else:
            yield wrong("verl", f"{line}. No padded job runs.")
    if untried := untried_verl():
        yield warning("verl", untried)


def plug_in() -> Iterator[Finding]:
    """The entry point, the trainers and the config groups, each tried as verl and Hydra use
    them."""
    # First, since verl loads modules that derive from our trainers once they are there: they have
    # to be there whole.
    import verl  # noqa: F401

    import verl_padding.entry.import_hooks

    if f"{PACKAGE}.plugin" in sys.modules:
        yield ok("entry point", "loaded by verl")
    else:
        why = f"verl has not loaded it ({PLUGIN_POLICY}={os.getenv(PLUGIN_POLICY, 'auto')})"
        yield wrong("entry point", f"{why}. Install {PACKAGE} beside verl, or add its name.")
    # If verl's entry point could not import them, this says why.
    import verl_padding.driver.trainers  # noqa: F401

    yield ok("trainers", "replace verl's")
    from verl_padding.job.composition import JobArguments, compose_job

    # What Hydra does with a group that it does not find: +padding=prompt adds a key of that value.
    if isinstance(compose_job(JobArguments(overrides=("+padding=prompt",))).padding, str):
        fix = "Install the plug-in anew"
        yield wrong("config groups", f"Hydra has not found +padding=prompt. {fix}.")
    else:
        yield ok("config groups", "found by Hydra")


def choose_platform() -> None:
    """A torch without accelerators can import verl's modules on the platform "cpu" only, so there
    it is set."""
    try:
        import torch
    except ImportError:  # reported as a version that is missing
        return
    if not (torch.version.cuda or torch.version.hip or find_spec("torch_npu")):
        os.environ["VERL_PLATFORM"] = "cpu"
