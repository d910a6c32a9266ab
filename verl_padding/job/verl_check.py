"""Refuses what the installed verl does not admit, by its source, before Ray starts.

Without a fact of the core, no padded job runs; without one of a setting, no job that sets it, and
without one of a saving, none that has it.
"""

from collections.abc import Collection, Iterator
from functools import cache

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import Incompatibility, refuse
from verl_padding.job.savings import SAVINGS
from verl_padding.job.verl_facts import FACTS, Fact
from verl_padding.job.verl_source import VerlSource, installed_verl

TRIED = ("0.9.1",)
"""Releases of verl with which all tests have run; setup.cfg allows others, which have all facts of
the core or are refused."""
FIX = f"Install verl=={TRIED[-1]}, or leave +padding out."


@cache
def missing_facts(source: VerlSource) -> dict[Fact, str]:
    """The facts that do not hold in verl's source, each with a line that says what is missing."""
    return {fact: what for fact in FACTS if (what := fact.what_is_missing(source))}


def _missing(strategies: Collection[str]) -> list[tuple[Fact, str]]:
    """Of the installed verl, without facts about engines of other strategies."""
    return [
        (fact, line)
        for fact, line in missing_facts(installed_verl()).items()
        if not fact.engine or any(each.startswith(fact.engine) for each in strategies)
    ]


def check_verl(config: DictConfig, strategies: Collection[str] = ()) -> None:
    """Refuses a job that needs a fact which does not hold: of the core, of one of the strategies of
    its engines, or of a setting of its config. Savings are turned off elsewhere."""
    missing = _missing(strategies)
    if core := [line for fact, line in missing if not fact.needed_by]:
        refuse(f"verl=={installed_verl().version}", "; ".join(core), FIX)
    for fact, line in missing:
        value = OmegaConf.select(config, fact.needed_by)
        if value and fact.needed_by.removeprefix("padding.") not in SAVINGS:
            refuse(f"{fact.needed_by}={value}", line, f"Set another value. {FIX}")


def saving_incompatibilities(saving: str, strategies: Collection[str]) -> Iterator[Incompatibility]:
    """What a saving needs of verl and does not find, in a job with engines of these strategies."""
    for fact, line in _missing(strategies):
        if fact.needed_by == f"padding.{saving}":
            yield Incompatibility(f"verl=={installed_verl().version}", line, FIX)


def untried_verl() -> str:
    """What is to be said of a release of verl that was not tried; empty of one that was."""
    if (version := installed_verl().version) in TRIED:
        return ""
    tested = f"verl=={version} was not tested (tested: {', '.join(TRIED)})"
    return f"{tested}. Compare the first steps with those under a tested release."
