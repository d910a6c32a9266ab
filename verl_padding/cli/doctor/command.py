"""The command ``verl-padding doctor``: shows what was checked, and what came of it."""

from rich.console import Console
from rich.text import Text

from verl_padding.cli.doctor.finding import run_check
from verl_padding.cli.doctor.installation import choose_platform, plug_in, verl, versions
from verl_padding.cli.doctor.job import check_job_of
from verl_padding.cli.job_config import quiet_imports
from verl_padding.errors import plural
from verl_padding.job.composition import JobArguments

STYLES = {"ok": "green", "hint": "blue", "warning": "yellow", "wrong": "red"}


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
    # Hints last: what else the job could use.
    findings = sorted(dict.fromkeys(findings), key=lambda each: each.verdict == "hint")
    for each in findings:
        verdict = Text(f"{each.verdict:9}", style=STYLES[each.verdict])
        said = Text(f"{each.subject}: {each.message}")
        console.print(verdict, said, sep="", soft_wrap=True)
    if wrong := sum(each.verdict == "wrong" for each in findings):
        console.print(f"{wrong} wrong.", style="red")
    elif arguments is None:
        console.print("No problems found. Pass a job's overrides to check the job, too.")
    else:
        found = "No problems found"
        if warnings := sum(each.verdict == "warning" for each in findings):
            what = "the job can start, but may not do what is meant"
            found = f"{plural(warnings, 'warning')}: {what}"
        console.print(
            f"{found}. verl-padding dry-run runs your data, agent, rewards and a step on this "
            "machine."
        )
    return int(wrong > 0)
