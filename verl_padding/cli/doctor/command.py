"""The command ``verl-padding doctor``: shows what was checked, and what came of it."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_padding.cli.doctor.finding import Finding, Verdict, run_check
from verl_padding.cli.doctor.installation import choose_platform, plug_in, verl, versions
from verl_padding.cli.doctor.job import PADDING_OFF, check_job_of
from verl_padding.cli.job_config import quiet_imports
from verl_padding.job.composition import JobArguments
from verl_padding.plan.plural import plural

STYLES: dict[Verdict, str] = {"ok": "green", "hint": "blue", "warning": "yellow", "wrong": "red"}


def diagnose(arguments: JobArguments | None, *, console: Console) -> int:
    """Prints what was found of the installation and of a job, None for no job; returns 1 if
    something is wrong, else 0."""
    with quiet_imports(finds_modules=arguments is not None), console.status("checking"):
        findings = run_check("versions", versions())
        findings += run_check("verl", verl())
        choose_platform()
        findings += run_check("plug-in", plug_in())
        if arguments is not None:
            findings += run_check("job", check_job_of(arguments))
    findings = list(dict.fromkeys(findings))
    console.print(_table(each for each in findings if each.verdict != "hint"))
    if hints := [each for each in findings if each.verdict == "hint"]:
        console.print("\nWhat else the job could use:")
        console.print(_table(hints))
    for finding in findings:
        if finding.details:
            console.print(Text(f"\n{finding.subject}:", style="red"))
            console.print(finding.details, markup=False, highlight=False)
    console.print(_verdict(findings, for_a_job=arguments is not None))
    return int(any(finding.verdict == "wrong" for finding in findings))


def _verdict(findings: list[Finding], *, for_a_job: bool) -> Text:
    if wrong := sum(finding.verdict == "wrong" for finding in findings):
        return Text(f"{wrong} wrong.", style="red")
    if not for_a_job:
        return Text("Nothing wrong was found. Give a job's overrides to check it too.")
    message = "Nothing wrong was found"
    if warnings := sum(finding.verdict == "warning" for finding in findings):
        message = f"{plural(warnings, 'warning')}: the job can start, but may not do what is meant"
    if PADDING_OFF in findings:
        message += ", but the job trains without padding"
    next_step = "verl-padding dry-run runs your data, agent, rewards and a step on this machine."
    return Text(f"{message}. {next_step}")


def _table(findings: Iterable[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
        table.add_row(verdict, Text(f"{finding.subject}: {finding.message}"))
    return table
