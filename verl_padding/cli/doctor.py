"""The command ``verl-padding doctor``: shows what was looked at, and what came of it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import chain

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_padding.doctor.devices import choose_platform, platform_of_verl
from verl_padding.doctor.finding import Finding, Look, Verdict
from verl_padding.doctor.installation import plug_in, versions
from verl_padding.doctor.job import NOT_ASKED_FOR, looks_at_job
from verl_padding.doctor.own_files import READ
from verl_padding.job.composition import JobArguments

STYLES: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "wrong": "red", "not looked at": "dim"}
WIDE = 110
"""Columns of a terminal that has room for the titles of looks beside the keys of settings."""
TOLD_IN_FULL = ("plan",)
"""Looks whose findings are all shown: they say what the plug-in will do."""


def diagnose(arguments: JobArguments | None, *, console: Console, verbose: bool = False, as_json: bool = False) -> int:
    """Prints what was found, and returns 1 if something is wrong, else 0.

    Args:
        arguments: a job's, as they are given to ``verl.trainer.main_ppo``; None for no job.
        verbose: show every finding.
        as_json: print all findings as JSON, and nothing else.
    """
    looks: list[Look] = []
    with _as_a_job_would_start(), console.status("versions") as status:
        for look in _looks(arguments):
            looks.append(look)
            status.update(f"{look.title}: looked at")
    findings = [finding for look in looks for finding in look.findings]
    is_wrong = any(finding.verdict == "wrong" for finding in findings)
    if as_json:
        told = {"ok": not is_wrong, "looks": [dataclasses.asdict(look) for look in looks]}
        console.file.write(json.dumps(told) + "\n")
        return int(is_wrong)
    console.print(_table(looks, verbose, with_titles=console.width >= WIDE))
    for finding in findings:
        if finding.details:
            console.print(Text(f"\n{finding.subject}:", style="red"))
            console.print(finding.details, markup=False, highlight=False)
    console.print(_verdict(findings, for_a_job=arguments is not None))
    return int(is_wrong)


def _looks(arguments: JobArguments | None) -> Iterator[Look]:
    yield Look.at("versions", versions)
    platform = choose_platform()
    yield Look.at("plug-in", lambda: chain(plug_in(), platform_of_verl(platform)))
    if arguments is not None:
        yield from looks_at_job(arguments, platform)


@contextmanager
def _as_a_job_would_start() -> Iterator[None]:
    """Modules beside the user are found, as by ``python -m``; what other packages print is kept out of the report."""
    here = os.getcwd()
    sys.path.insert(0, here)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")  # verl's, of engines that are not installed
            yield
    finally:
        logging.disable(disabled)
        sys.path.remove(here)


def _verdict(findings: list[Finding], *, for_a_job: bool) -> Text:
    verdicts = [finding.verdict for finding in findings]
    if "wrong" in verdicts:
        return Text(f"{verdicts.count('wrong')} wrong.", style="red")
    if not for_a_job:
        return Text("Nothing wrong was found. Give a job's overrides to check it too.")
    told = "Nothing wrong was found" + (", but the job trains without padding" if NOT_ASKED_FOR in findings else "")
    told += "; code of your own was read, not run" if READ in findings else ""
    for verdict in ("warning", "not looked at"):
        if count := verdicts.count(verdict):
            told += f"; {count} {verdict}" + ("s" if verdict == "warning" and count > 1 else "")
    return Text(f"{told}.")


def _table(looks: list[Look], verbose: bool, *, with_titles: bool) -> Table:
    """A line for each finding that is not ok, and one for all others of a look; with ``verbose``, a line for each.

    Args:
        with_titles: give the title of each look a column of its own.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    if with_titles:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for look in looks:
        in_full = verbose or look.title in TOLD_IN_FULL
        title = look.title
        well = [finding for finding in look.findings if finding.verdict == "ok"]
        if well and not in_full:
            told = Text(_in_short(look.title, well))
            table.add_row(_word("ok"), *([title, told] if with_titles else [Text(f"{title}: ") + told]))
            title = ""
        for finding in look.findings:
            if in_full or finding.verdict != "ok":
                table.add_row(_word(finding.verdict), *([title] if with_titles else []), _line(finding))
                title = ""
    return table


def _in_short(title: str, findings: list[Finding]) -> str:
    if title == "versions":
        return ", ".join(f"{finding.subject} {finding.told.split(' ')[0]}" for finding in findings)
    return ", ".join(dict.fromkeys(finding.subject for finding in findings))


def _word(verdict: Verdict) -> Text:
    return Text(verdict, style=STYLES[verdict])


def _line(finding: Finding) -> Text:
    is_value = ("." in finding.subject or finding.subject.isupper()) and not finding.told.startswith("not set")
    separator = "=" if is_value else ": "
    return Text(f"{finding.subject}{separator}{finding.told}")
