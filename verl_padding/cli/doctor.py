"""The command ``verl-padding doctor``: shows what was checked, and what came of it."""

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_padding.cli.job_config import as_a_job_would_start
from verl_padding.doctor.finding import Check, Finding, Verdict
from verl_padding.doctor.installation import choose_platform, plug_in, versions
from verl_padding.doctor.job import PADDING_OFF, checks_of_job
from verl_padding.job.composition import JobArguments

STYLES: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "wrong": "red"}


def diagnose(arguments: JobArguments | None, *, console: Console) -> int:
    """Prints what was found of the installation and of a job, None for no job; returns 1 if
    something is wrong, else 0."""
    with as_a_job_would_start(), console.status("checking"):
        checks = [Check.run("versions", versions())]
        choose_platform()
        checks.append(Check.run("plug-in", plug_in()))
        if arguments is not None:
            checks.extend(checks_of_job(arguments))
    findings = [finding for check in checks for finding in check.findings]
    console.print(_table(findings))
    for finding in findings:
        if finding.details:
            console.print(Text(f"\n{finding.subject}:", style="red"))
            console.print(finding.details, markup=False, highlight=False)
    console.print(_verdict(findings, for_a_job=arguments is not None))
    return int(any(finding.verdict == "wrong" for finding in findings))


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


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
        table.add_row(verdict, Text(f"{finding.subject}: {finding.message}"))
    return table
