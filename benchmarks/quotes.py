"""What the pages quote of the benchmarks, word for word, with the figures from the files that are kept.

    python -m benchmarks.quotes [--write]

tells each quote whose figures are not those of its page, and with ``--write`` puts them there: after a benchmark was
run with ``--keep``. The words are the page's; only what stands between them is written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.relative_errors import shown, worst
from benchmarks.results import console, kept, kept_file

ROOT = Path(__file__).parent.parent
Figures = dict[str, Any]

_FIGURE = r"[^\s|]+?(?: %| to [^\s|]+?)?"


@dataclass(frozen=True)
class Quote:
    page: str
    """Path of the page in the repository."""
    words: str
    """The page's words, each figure a ``{name}``; a space stands for a line's end as well."""
    figures: dict[str, str] = field(default_factory=dict)
    """What stands in the place of each name."""

    def found(self, text: str) -> re.Match[str]:
        """Where the words stand in a page, with whatever figures.

        Raises:
            ValueError: nowhere, or more than once.
        """
        parts = re.split(r"\{(\w+)\}", self.words)
        pattern = "".join(
            f"(?P<{part}>{_FIGURE})" if at % 2 else re.sub(r"(?:\\ )+", r"\\s+", re.escape(part))
            for at, part in enumerate(parts)
        )
        places = list(re.finditer(pattern, text))
        if len(places) != 1:
            raise ValueError(f"{self.page}: {len(places)} times, and not once, it says: {self.words}")
        return places[0]

    def differences(self, text: str) -> dict[str, tuple[str, str]]:
        """Name -> (what the page says, what was measured), of the figures that differ."""
        said = self.found(text).groupdict()
        return {name: (said[name], figure) for name, figure in self.figures.items() if said[name] != figure}

    def written(self, text: str) -> str:
        """The page with the measured figures."""
        place = self.found(text)
        for name in sorted(self.figures, key=place.start, reverse=True):
            text = text[: place.start(name)] + self.figures[name] + text[place.end(name) :]
        return text


def quotes() -> Iterator[tuple[str, Quote]]:
    """(benchmark, quote) of all that the pages quote."""
    for benchmark, function in BENCHMARKS.items():
        figures = kept(benchmark)
        for quote in function(figures):
            yield benchmark, quote


def _layout(it: Figures) -> Iterator[Quote]:
    names = ("1100, 8, 16k", "1100, 8, 32k", "3509, 8, 16k", "700, 16, 32k", "361, 2, 4k")
    per_step, per_micro = [], []
    for name, job in zip(names, it["five"], strict=True):
        step, micro, count = job["per_mini_batch"], job["per_micro_batch"], job["micro_batches"]
        per_step.append((name, [f"{step[side]:.3f}" for side in ("verl", "plan+verl")]))
        times = [f"{micro[side]:.3f}" for side in ("verl", "plan+verl", "plan")]
        per_micro.append((name, [*times, str(count["verl"]), str(count["plan"])]))
    yield _table("README.md", per_step)
    yield _table("README.md", per_micro)
    same, own = it["summary"]["the same rows in each step"], it["summary"]["verl's number of steps"]
    step, micro = same["per_mini_batch"]["verl_over_plan+verl"], same["per_micro_batch"]["verl_over_plan"]
    worse = same["per_mini_batch"]["plan+verl_worse_than_verl"] + same["per_micro_batch"]["plan_worse_than_verl"]
    yield Quote(
        "README.md",
        "On {jobs} random jobs of 2 to 512 ranks, with the same rows in each step as verl has there, verl takes {step} "
        "times as long as the plan per step at the median ({step_least} to {step_most}), and {micro} times per "
        "micro-batch ({micro_least} to {micro_most}); the plan is {worse} slower.",
        {
            "jobs": str(len(it["random"]["the same rows in each step"]["per_mini_batch"]["verl"])),
            "step": f"{step['median']:.2f}",
            "step_least": f"{step['least']:.2f}",
            "step_most": f"{step['most']:.2f}",
            "micro": f"{micro['median']:.2f}",
            "micro_least": f"{micro['least']:.2f}",
            "micro_most": f"{micro['most']:.2f}",
            "worse": "never" if not worse else f"{worse} times",
        },
    )
    yield Quote(
        "README.md",
        "it is {faster} times faster at the median. Which long rows share a step is then a matter of chance, and the "
        "plan is slower in {slower} of the {jobs} jobs.",
        {
            "faster": f"{own['per_mini_batch']['verl_over_plan+verl']['median']:.2f}",
            "slower": str(own["per_mini_batch"]["plan+verl_worse_than_verl"]),
            "jobs": str(len(it["random"]["verl's number of steps"]["per_mini_batch"]["verl"])),
        },
    )
    yield from _layout_in_other_pages(it["five"])


def _layout_in_other_pages(five: list[Figures]) -> Iterator[Quote]:
    stock = sorted(job["per_mini_batch"]["verl"] for job in five)
    yield Quote(
        "docs/why.md",
        "each step | {least} to {most} times the lower bound |",
        {"least": f"{stock[0]:.2f}", "most": f"{stock[-1]:.2f}"},
    )
    times = {side: sorted(job["per_micro_batch"][side] for job in five) for side in ("verl", "plan+verl", "plan")}
    spans = {
        f"{part}_{end}": f"{times[side][at]:.2f}"
        for part, side in (("stock", "verl"), ("mixed", "plan+verl"), ("own", "plan"))
        for end, at in (("least", 0), ("most", -1))
    }
    yield Quote(
        "docs/design.md",
        "stock verl takes {stock_least} to {stock_most} times the lower bound on five jobs, verl's packer in the "
        "plan's cells {mixed_least} to {mixed_most} times, and the plan's packer {own_least} to {own_most} times",
        spans,
    )


def _zero_effect(it: Figures) -> Iterator[Quote]:
    page = "docs/zero_effect.md"
    losses_shown, estimators_shown = [], []
    for line in it["losses"]:
        stock, ours, name = line["stock verl"], line["verl_padding"], line["loss"]
        kind, _, bare = name.rpartition(" ")
        title = name if name == "value loss" else f"{kind} `{bare}`".strip()
        modes = [stock["token-mean"], stock["seq-mean-token-mean"], worst(list(stock.values()))]
        losses_shown.append((title, [shown(error) for error in (*modes, worst(list(ours.values())))]))
    for line in filter(_runs, it["estimators"]):
        cells = [shown(line[pads][side]["gradient"]) for side in _SIDES for pads in ("59 pads", "1 pads")]
        estimators_shown.append((f"`{line['estimator']}`", cells))
    yield _table(page, losses_shown)
    yield _table(page, estimators_shown)
    sessions = it["sessions"]
    weights = [(f"`{mode}`", [f"{told[side]:.3g}" for side in _SIDES]) for mode, told in sessions["weight"].items()]
    yield _table(page, weights)
    credit = {name: told for name, told in sessions["credit"].items() if not isinstance(told, str)}
    yield _table(page, [(f"`{name}`", [shown(told[side]) for side in _SIDES]) for name, told in credit.items()])
    losses = {line["loss"]: line["stock verl"] for line in it["losses"]}
    estimators = {line["estimator"]: line["59 pads"]["stock verl"] for line in it["estimators"] if _runs(line)}
    half = f"{100 * losses['vanilla']['seq-mean-token-mean']:.0f}"
    gpg = f"{100 * estimators['gpg']['gradient']:.0f}"
    opo = shown(estimators["opo"]["gradient"])
    kl, off = estimators["grpo"]["kl_coefficient"], estimators["grpo"]["rollout_corr_metrics_off"]
    yield Quote(
        page,
        "controller is {kl} off in stock verl, and {off} of the {metrics} metrics of the rollout correction are off",
        {"kl": shown(kl), "off": str(off), "metrics": str(estimators["grpo"]["rollout_corr_metrics"])},
    )
    yield Quote(
        "README.md",
        "Stock verl is {half} % off in the seq-mean modes",
        {"half": half},
    )
    token_mean = {name: f"{100 * losses[name]['token-mean']:.0f}" for name in ("sapo", "geo_mean")}
    yield Quote(
        "README.md", "two policy losses are off: `sapo` by {sapo} % and `geo_mean` by {geo_mean} %;", token_mean
    )
    yield Quote(
        "README.md",
        "Stock verl is {gpg} % off with the `gpg` estimator and gives {opo} with `opo`;",
        {"gpg": gpg, "opo": opo},
    )
    yield Quote("docs/why.md", "61 of 120 rows: the gradient is {half} % off", {"half": half})
    yield Quote("docs/why.md", "`opo` gives {opo}, `gpg` is {gpg} % off with 59 pads", {"gpg": gpg, "opo": opo})


def _table(page: str, lines: list[tuple[str, list[str]]]) -> Quote:
    """All lines of a table, one below the other: title and figures."""
    words, figures = [], {}
    for number, (title, cells) in enumerate(lines):
        names = {f"line{number}_{place}": cell for place, cell in enumerate(cells)}
        words.append(f"| {title} | " + " | ".join(f"{{{name}}}" for name in names) + " |")
        figures |= names
    return Quote(page, " ".join(words), figures)


_SIDES = ("stock verl", "verl_padding")


def _runs(estimator: Figures) -> bool:
    """Whether verl's v1 trainer runs it without pads."""
    return "without pads" not in estimator["59 pads"]


def _train_step(it: Figures) -> Iterator[Quote]:
    titles = {
        "stock verl": "stock verl",
        "lcm, verl's packer": "`+padding=lcm`",
        "lcm, plan's": "`+padding=lcm padding.packer=plan`",
        "prompt, plan's": "`+padding=prompt padding.packer=plan`",
        "stock verl, one row a micro-batch": "stock verl, one row a micro-batch",
        "stock verl, 4 padded rows a micro-batch": "stock verl, 4 padded rows a micro-batch",
    }
    stock = [took["update"] for took in it["sides"]["stock verl"]]
    sides = it["sides"]
    for name, title in titles.items():
        took = sides[name]
        ratios = sorted(theirs / turn["update"] for theirs, turn in zip(stock, took, strict=True))
        line = {
            "steps": str(took[0]["steps"]),
            "wasted": f"{100 * took[0]['wasted_tokens']:.1f}",
            "peak": f"{median(turn['peak_bytes'] for turn in took) / 2**30:.2f}",
            "seconds": _seconds(took, "update", 1),
        }
        measured = f"| {title} | {{steps}} | {{wasted}} % | {{peak}} | {{seconds}} |"
        if name == "stock verl":
            yield Quote("README.md", f"{measured} 1.00 |", line)
            continue
        yield Quote(
            "README.md",
            f"{measured} {{gain}} ({{least}} to {{most}}) |",
            line | {"gain": f"{median(ratios):.2f}", "least": f"{ratios[0]:.2f}", "most": f"{ratios[-1]:.2f}"},
        )
    gains = {
        name: median(theirs / turn["update"] for theirs, turn in zip(stock, sides[side], strict=True))
        for name, side in (("own", "lcm, plan's"), ("mixed", "lcm, verl's packer"))
    }
    yield Quote(
        "docs/design.md",
        "where an update is {own} times as fast as stock verl's with it, and {mixed} times without (",
        {name: f"{gain:.2f}" for name, gain in gains.items()},
    )
    planned = [took for name, turns in sides.items() if not name.startswith("stock verl") for took in turns]
    yield Quote(
        "README.md", "Planning and pads took {seconds} s of these.", {"seconds": _seconds(planned, "before", 2)}
    )


def _scale(it: Figures) -> Iterator[Quote]:
    steps = {f"{step['rows']:,}": step["sides"] for step in it["steps"]}
    ratios, brought = {}, {}
    for rows, name in {"1,000": "few", "10,000": "more", "100,000": "many"}.items():
        stock, ours = (median(sum(took["cpu_seconds"].values()) for took in steps[rows][side]) for side in _SIDES)
        ratios[name] = f"{ours / stock:.2f}"
        parts = [set(steps[rows][side][0]["cpu_seconds"]) for side in _SIDES]
        stock, ours = (
            median(
                sum(seconds for part, seconds in took["cpu_seconds"].items() if part == "pads" or part not in others)
                for took in steps[rows][side]
            )
            for side, others in zip(_SIDES, reversed(parts), strict=True)
        )
        brought[name] = f"{ours / stock:.1f}"
    yield Quote(
        "README.md",
        "What padding brings, with its metrics, takes {few}, {more} and {many} times what stock verl's balancing and "
        "pads take",
        brought,
    )
    yield Quote(
        "README.md",
        "1,000, 10,000 and 100,000 rows take {few}, {more} and {many} times the processor time of stock verl, which "
        "adds {pads} of pads",
        ratios | {"pads": f"{round(100 * steps['10,000'][_SIDES[0]][0]['pads'] / 10_000)} %"},
    )


def _measured_costs(it: Figures) -> Iterator[Quote]:
    others = {"plan": "plan's packer", "verl": "verl's packer", "stock": "stock verl"}
    for mix, sides in it["mixes"].items():
        figures = {}
        for name, side in others.items():
            ratios = _times_as_fast(sides, "plan's packer, measured costs", side)
            figures |= {name: f"{median(ratios):.2f}", f"{name}_range": f"{ratios[0]:.2f} to {ratios[-1]:.2f}"}
        cells = " | ".join(f"{{{name}}} ({{{name}_range}})" for name in others)
        yield Quote("docs/timing.md", f"| {mix} | {cells} |", figures)
    ratios = {
        name: [
            median(_times_as_fast(sides, "plan's packer, measured costs", others[name]))
            for sides in it["mixes"].values()
        ]
        for name in ("stock", "verl")
    }
    yield Quote(
        "CHANGELOG.md",
        "updates of three mixes of rows are {least} to {most} times as fast as stock verl's, and {packer_least} to "
        "{packer_most} times as fast as with verl's packer (`python -m benchmarks.measured_costs`).",
        {
            "least": f"{min(ratios['stock']):.1f}",
            "most": f"{max(ratios['stock']):.1f}",
            "packer_least": f"{min(ratios['verl']):.1f}",
            "packer_most": f"{max(ratios['verl']):.1f}",
        },
    )
    shares = [
        it["clock_s"] * took["micro_batches"] / took["update"]
        for sides in it["mixes"].values()
        for took in sides["plan's packer, measured costs"]
    ]
    yield Quote(
        "docs/timing.md",
        "The marks and laps of the clock take {share} of these updates at most;",
        {"share": f"{100 * max(shares):.3f} %"},
    )


def _times_as_fast(sides: Figures, side: str, other: str) -> list[float]:
    """How many times as fast a side's updates were as another's, round by round, rising."""
    return sorted(theirs["update"] / its["update"] for theirs, its in zip(sides[other], sides[side], strict=True))


def _seconds(turns: list[Figures], name: str, digits: int) -> str:
    return f"{median(turn[name] for turn in turns):.{digits}f}"


def _planning(it: Figures) -> Iterator[Quote]:
    small, large = ({side: median(taken) for side, taken in batch["seconds"].items()} for batch in it["batches"])
    packed = sorted(second for cell in it["cells"] for second in cell["seconds"]["plan"])
    stock = sorted(second for cell in it["cells"] for second in cell["seconds"]["verl"])
    yield Quote(
        "README.md",
        "Planning 8,192 rows for 64 ranks takes {cells} s, or {whole} s with the micro-batches of four worker calls; "
        "verl's own balancing takes {verl} s. For 131,072 rows and 512 ranks it is {many_cells} s and {many_whole} s, "
        "and {many_verl} s for verl (`python -m benchmarks.planning --large`). Packing the 1,024 rows of a rank takes "
        "{least} to {most} ms; verl's packer takes {verl_least} to {verl_most} s.",
        {
            "cells": f"{small['cells']:.2f}",
            "whole": f"{small['whole plan']:.2f}",
            "verl": f"{small['verl']:.2f}",
            "many_cells": f"{large['cells']:.1f}",
            "many_whole": f"{large['whole plan']:.1f}",
            "many_verl": f"{large['verl']:.1f}",
            "least": f"{1e3 * packed[0]:.0f}",
            "most": f"{1e3 * packed[-1]:.0f}",
            "verl_least": f"{stock[0]:.1f}",
            "verl_most": f"{stock[-1]:.1f}",
        },
    )
    for page, words in (
        ("docs/why.md", "Planning 8,192 rows for 64 ranks takes {seconds} s"),
        ("docs/metrics.md", "{seconds} s for 8,192 rows and 64 ranks"),
    ):
        yield Quote(page, words, {"seconds": f"{small['cells']:.2f}"})


def _upsample(it: Figures) -> Iterator[Quote]:
    seconds = {
        (turn["rows"], turn["pads"], side): median(turn[side])
        for turn in it["upsample"]
        for side in ("verl", "verl_padding")
    }
    thousand = f"{seconds['text', 1000, 'verl_padding']:.2f}"
    yield Quote(
        "README.md",
        "Putting 1,000 pads into TransferQueue and clearing them takes {ours} s (verl: {verl} s); 10,000 pads take "
        "{many_ours} s (verl: {many_verl} s, or {routes} s with routed experts)",
        {
            "ours": thousand,
            "verl": f"{seconds['text', 1000, 'verl']:.2f}",
            "many_ours": f"{seconds['text', 10000, 'verl_padding']:.1f}",
            "many_verl": f"{seconds['text', 10000, 'verl']:.1f}",
            "routes": f"{seconds['routed experts', 10000, 'verl']:.1f}",
        },
    )
    yield Quote(
        "docs/why.md",
        "putting 1,000 pads into TransferQueue and clearing them {seconds} s;",
        {"seconds": thousand},
    )
    yield Quote("docs/metrics.md", "about {seconds} s for 1,000 pads", {"seconds": f"{float(thousand):.1f}"})


def _import_cost(it: Figures) -> Iterator[Quote]:
    verl, plugin = (median(it["milliseconds"][name]) for name in ("verl", "plugin"))
    yield Quote(
        "README.md",
        "Importing the plug-in adds {plugin} ms to verl's {verl} s",
        {"plugin": f"{plugin:.0f}", "verl": f"{verl / 1e3:.1f}"},
    )


def _demo_seeds(it: Figures) -> Iterator[Quote]:
    padded = it["padded"]
    yield Quote(
        "README.md",
        "Of {runs} seeds, each with a model, data and draws of its own, {learned} end above 0.95 over their last ten "
        "steps ({least} to {most}, {median} at the median), and none falls below {lowest} once a step has reached 0.95",
        {
            "runs": str(padded["runs"]),
            "learned": str(padded["learned"]),
            "least": f"{padded['last']['least']:.3f}",
            "most": f"{padded['last']['most']:.3f}",
            "median": f"{padded['last']['median']:.3f}",
            "lowest": f"{padded['lowest']:.3f}",
        },
    )


def _demo_pads(it: Figures) -> Iterator[Quote]:
    for title, side in (
        ("verl_padding", "verl_padding"),
        ("stock verl, its rule on the same rows", "stock verl, its rule"),
    ):
        of = it[side]
        least, most = min(of["optimizer_steps"]), max(of["optimizer_steps"])
        yield Quote(
            "README.md",
            f"| {title} | {{steps}} | {{share}} | {{tokens}} |",
            {
                "steps": str(least) if least == most else f"{least} to {most}",
                "share": f"{100 * sum(of['pads']) / sum(it['real_rows']):.1f} %",
                "tokens": f"{of['tokens_of_a_pad']:.0f}",
            },
        )
    steps = it["stock verl, its rule"]["optimizer_steps"]
    yield Quote(
        "docs/why.md",
        "the demo's batches take {steps} steps where {configured} are configured",
        {
            "steps": f"{min(steps)} to {max(steps)}",
            "configured": str(max(it["verl_padding"]["optimizer_steps"])),
        },
    )


def _subagents_seeds(it: Figures) -> Iterator[Quote]:
    for trainer, title in (("padded", "`+padding=prompt`"), ("stock", "stock verl")):
        runs = [run for name, run in sorted(it["runs"].items()) if name.startswith(trainer)]
        steps = [number for run in runs for number in run["optimizer_steps"]]
        rewards = {f"seed{seed}": f"{run['last']:.2f}" for seed, run in enumerate(runs)}
        words = " | ".join(f"{{{name}}}" for name in rewards)
        yield Quote(
            "recipes/subagents/README.md",
            f"| {title} | {{steps}} | {words} |",
            {"steps": str(min(steps)) if len(set(steps)) == 1 else f"{min(steps)} to {max(steps)}", **rewards},
        )


def _every_call_seeds(it: Figures) -> Iterator[Quote]:
    runs = [run for name, run in sorted(it["runs"].items()) if name.startswith("shared")]
    for title, figure in (("mean reward of a session", "last"), ("tokens / computed tokens", "sharing_factor")):
        figures = {f"seed{seed}": f"{run[figure]:.2f}" for seed, run in enumerate(runs)}
        words = " | ".join(f"{{{name}}}" for name in figures)
        yield Quote("recipes/every_call/README.md", f"| {title} | {words} |", figures)
    last = {"unshared": f"{it['runs']['unshared_seed0']['last']:.2f}"}
    yield Quote("recipes/every_call/README.md", "without sharing learns the same ({unshared})", last)
    for title, key in (("update", "update_s"), ("log-prob pass", "log_prob_s"), ("step", "step_s")):
        seconds = {side: f"{it['runs'][f'{side}_seed0'][key]:.1f}" for side in ("shared", "unshared")}
        yield Quote("recipes/every_call/README.md", f"| {title} | {{shared}} | {{unshared}} |", seconds)


SHARING_SIDES = {"stock": "stock verl", "plan": "plan", "chains": "plan with chains"}


def _sharing(it: Figures) -> Iterator[Quote]:
    for turns, ratios in it["ratios"].items():
        gib = {name: median(took["memory_gib"] for took in rounds) for name, rounds in it["sides"][turns].items()}
        yield Quote(
            "README.md",
            f"| {turns} | {{factor}} | {{plan}} ({{plan_least}} to {{plan_most}}) "
            "| {stock} ({least} to {most}) | {stock_gib} | {plan_gib} | {chains_gib} |",
            {
                **{f"{side}_gib": f"{gib[name]:.2f}" for side, name in SHARING_SIDES.items()},
                "factor": f"{ratios['sharing_factor']:.2f}",
                "plan": f"{median(ratios['plan_over_chains']):.2f}",
                "plan_least": f"{min(ratios['plan_over_chains']):.2f}",
                "plan_most": f"{max(ratios['plan_over_chains']):.2f}",
                "stock": f"{median(ratios['stock_over_chains']):.2f}",
                "least": f"{min(ratios['stock_over_chains']):.2f}",
                "most": f"{max(ratios['stock_over_chains']):.2f}",
            },
        )
    steps = {
        side: [of_turns[side][0]["steps"] for turns, of_turns in it["sides"].items() if turns != "1"]
        for side in ("stock verl", "plan with chains")
    }
    yield Quote(
        "README.md",
        "From two turns on, stock verl takes {least} to {most} optimizer steps for the same rows, and the plan {plan}",
        {
            "least": str(min(steps["stock verl"])),
            "most": str(max(steps["stock verl"])),
            "plan": str(max(steps["plan with chains"])),
        },
    )
    longest = it["ratios"]["16"]
    yield Quote(
        "CHANGELOG.md",
        "At 16 turns, sharing is {plan} times as fast as the plan without it, and {stock} times as fast as stock verl",
        {
            "plan": f"{median(longest['plan_over_chains']):.2f}",
            "stock": f"{median(longest['stock_over_chains']):.2f}",
        },
    )
    shares = [
        median(ratios["plan_over_chains"]) / ratios["sharing_factor"]
        for ratios in it["ratios"].values()
        if ratios["sharing_factor"] > 1
    ]
    yield Quote(
        "README.md",
        "From two turns on, an update gains {least} to {most} of tokens / computed tokens at the median.",
        {"least": f"{min(shares):.2f}", "most": f"{max(shares):.2f}"},
    )
    yield Quote(
        "README.md",
        "On {batches} random batches, the slowest ranks take {ours} times the lower bound at the median, and {plain} "
        "times the larger of the dearest tip and the mean of the ranks; a plan that knows nothing of prefixes would "
        "take {blind} times the bound, with the same engine. Planning 131,072 rows for 512 ranks takes {seconds} s.",
        {
            "batches": str(len(it["plans"]["over_bound"])),
            "ours": f"{median(it['plans']['over_bound']):.3f}",
            "plain": f"{median(it['plans']['over_mean_or_tip']):.3f}",
            "blind": f"{median(it['plans']['blind_over_bound']):.3f}",
            "seconds": f"{it['many']['seconds']:.1f}",
        },
    )
    lineage = it["lineage"]
    first, *later = lineage["searched"]
    yield Quote(
        "docs/sharing.md",
        "In {rows} rows with {tokens} million tokens, {turns} to a session, the search took {later} s, and {first} s "
        "the first time, when its tasks start; an update of the benchmark's model would be spared {spared} s here. So "
        "the search takes less than 2 % of what it saves where an update is spared more than {least} s, and "
        "{least_first} s in the first step",
        {
            "rows": f"{lineage['rows']:,}",
            "tokens": f"{lineage['tokens'] / 1e6:.0f}",
            "turns": "8",
            "later": f"{median(later):.1f}",
            "first": f"{first:.1f}",
            "spared": f"{lineage['spared_s']:,.0f}",
            "least": f"{median(later) / 0.02:.0f}",
            "least_first": f"{first / 0.02:.0f}",
        },
    )


BENCHMARKS: dict[str, Callable[[Figures], Iterator[Quote]]] = {
    "layout": _layout,
    "zero_effect": _zero_effect,
    "train_step": _train_step,
    "scale": _scale,
    "measured_costs": _measured_costs,
    "planning": _planning,
    "upsample": _upsample,
    "import_cost": _import_cost,
    "sharing": _sharing,
    "demo_pads": _demo_pads,
    "demo_seeds": _demo_seeds,
    "subagents_seeds": _subagents_seeds,
    "every_call_seeds": _every_call_seeds,
}
"""What is quoted of each benchmark. A new one keeps its figures by ``benchmarks.results.tell`` and is named here."""


def main(write: Annotated[bool, typer.Option("--write", help="Put the kept figures into the pages.")] = False) -> None:
    """Tells, or mends, the quotes that are not what was measured."""
    differ = 0
    for benchmark, quote in quotes():
        path = ROOT / quote.page
        text = path.read_text()
        differences = quote.differences(text)
        differ += len(differences)
        for name, (said, measured) in differences.items():
            console.print(f"{quote.page}: {name} {said}, measured {measured} ({kept_file(benchmark).name})")
        if write and differences:
            path.write_text(quote.written(text))
    if not differ:
        console.print("The pages say what was measured.")
    sys.exit(0 if write or not differ else 1)


if __name__ == "__main__":
    typer.run(main)
