"""The command ``verl-padding doctor``: shows what was checked, and what came of it."""

import dataclasses
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from warnings import catch_warnings

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_padding.doctor.finding import Check, Finding, Verdict
from verl_padding.doctor.installation import choose_platform, plug_in, versions
from verl_padding.doctor.job import PADDING_OFF, checks_of_job
from verl_padding.job.composition import JobArguments

STYLES: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "wrong": "red"}


def diagnose(
    arguments: JobArguments | None,
    *,
    console: Console,
    verbose: bool = False,
    as_json: bool = False,
) -> int:
    """Prints what was found of the installation and of a job, None for no job; returns 1 if
    something is wrong, else 0.

    ``verbose`` shows every finding; ``as_json`` prints them all as JSON, and nothing else.
    """
    with as_a_job_would_start(), console.status("checking"):
        checks = [Check.run("versions", versions())]
        platform = choose_platform()
        checks.append(Check.run("plug-in", plug_in()))
        if arguments is not None:
            checks.extend(checks_of_job(arguments, platform))
    findings = [finding for check in checks for finding in check.findings]
    is_wrong = any(finding.verdict == "wrong" for finding in findings)
    if as_json:
        result = {"ok": not is_wrong, "checks": [dataclasses.asdict(check) for check in checks]}
        console.file.write(json.dumps(result) + "\n")
        return int(is_wrong)
    console.print(_table(checks, verbose))
    for finding in findings:
        if finding.details:
            console.print(Text(f"\n{finding.subject}:", style="red"))
            console.print(finding.details, markup=False, highlight=False)
    console.print(_verdict(findings, for_a_job=arguments is not None))
    return int(is_wrong)


@contextmanager
def as_a_job_would_start() -> Iterator[None]:
    """Modules beside the user are found, as by ``python -m``; what other packages print is kept out
    of the report."""
    here = os.getcwd()
    sys.path.insert(0, here)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        # verl warns of engines that are not installed.
        with catch_warnings(action="ignore"), redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(disabled)
        sys.path.remove(here)


def _verdict(findings: list[Finding], *, for_a_job: bool) -> Text:
    counts = Counter(finding.verdict for finding in findings)
    if counts["wrong"]:
        return Text(f"{counts['wrong']} wrong.", style="red")
    if not for_a_job:
        return Text("Nothing wrong was found. Give a job's overrides to check it too.")
    message = "Nothing wrong was found" + (
        ", but the job trains without padding" if PADDING_OFF in findings else ""
    )
    message += f"; {counts['warning']} warning" if counts["warning"] else ""
    return Text(
        f"{message}. verl-padding dry-run runs your data, agent, rewards and a step on this "
        "machine."
    )


def _table(checks: list[Check], verbose: bool) -> Table:
    """A line for each finding that is not ok, and one for all others of a check; with ``verbose``,
    a line for each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        in_full = verbose or check.title == "plan"  # what the plug-in will do
        well = [finding for finding in check.findings if finding.verdict == "ok"]
        if well and not in_full:
            with_message = check.title == "versions"
            short = (
                f"{each.subject} {each.message}" if with_message else each.subject for each in well
            )
            table.add_row(
                Text("ok", style=STYLES["ok"]),
                Text(f"{check.title}: {', '.join(dict.fromkeys(short))}"),
            )
        for finding in check.findings:
            if in_full or finding.verdict != "ok":
                line = Text(f"{finding.subject}: {finding.message}")
                table.add_row(Text(finding.verdict, style=STYLES[finding.verdict]), line)
    return table
