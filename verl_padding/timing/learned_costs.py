"""Costs that a job learns from its own clock, call by call, and keeps with its checkpoints."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_padding.errors import PaddingDataError
from verl_padding.plan.cost import CostModel
from verl_padding.plan.counted import counted
from verl_padding.plan.measured_cost import NANOSECONDS, MeasuredCost, Measurement, fit_cost, micro_batch_cost
from verl_padding.timing.laps import Lap, TimedStep

FILE = "padding_costs.json"
"""In the folder of a checkpoint."""
WINDOW = 8
"""Steps that a fit looks back, and over which its errors are compared with the formula's."""
MOST = 4096
"""Measurements of a call that a fit takes from its window; of more, an even share."""


Foretold = tuple[float, float, float]
"""Seconds of a micro-batch, those that the fit of the steps before foretold, and its cost by the formula."""


@dataclass
class _Learned:
    """What is known of one call."""

    seen: deque[list[Measurement]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    foretold: deque[list[Foretold]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Of each step, its micro-batches."""
    fitted: MeasuredCost | None = None
    used: bool = False

    def errors(self) -> tuple[float, float]:
        """How wrong the fits were over the window, and the formula, as shares of the measured seconds.

        The formula knows no seconds: it is granted one scale for the whole window.
        """
        seconds, by_fit, by_formula = np.array([each for step in self.foretold for each in step]).T
        scaled = by_formula * (seconds.sum() / by_formula.sum())
        fit, formula = (float(np.abs(told - seconds).sum() / seconds.sum()) for told in (by_fit, scaled))
        return fit, formula


class LearnedCosts:
    """What micro-batches of each call cost, by the steps seen so far.

    After each step the fit of the steps before it and the formula both foretell the step's seconds. Once the fit has
    been the better one, over the steps of the window together, the plan uses it; where the formula is better again,
    that. The same laps give the same costs.
    """

    def __init__(self) -> None:
        self._learned: dict[str, _Learned] = defaultdict(_Learned)

    def cost_of(self, call: str) -> MeasuredCost | None:
        """The cost that the plan of a call is to use; None for the formula."""
        known = self._learned.get(call)
        return known.fitted if known is not None and known.used else None

    def learn(self, timed: TimedStep, formulas: Mapping[str, CostModel]) -> list[str]:
        """Learns from a step.

        Args:
            formulas: of each call, what the plan uses while nothing better is known.

        Returns: a sentence for each call whose plan changes over.
        """
        told = []
        for call in timed.calls:
            laps, known = timed.of_call(call), self._learned[call]
            groups = _told_together(laps)
            if known.fitted is not None:
                known.foretold.append([_foretold(group, known.fitted, formulas[call]) for group in groups])
            known.seen.append([_measurement(group) for group in groups])
            seen = [each for step in known.seen for each in step]
            known.fitted = fit_cost(seen[:: -(-len(seen) // MOST)]) or known.fitted
            if known.fitted is None or not known.foretold:
                continue
            fit, formula = known.errors()
            if known.used != (fit < formula):
                known.used = not known.used
                told.append(
                    f"from step {timed.step + 1} on, {call} is planned by "
                    f"{'measured costs' if known.used else 'the formula'}: over the last "
                    f"{counted(len(known.foretold), 'step')} measured costs were off by {fit:.3f}, the formula by "
                    f"{formula:.3f}"
                )
        return told

    def write(self, path: Path) -> None:
        """Writes all that is known."""
        said = {
            call: {
                "cost": None if known.fitted is None else asdict(known.fitted),
                "used": known.used,
                "foretold": list(known.foretold),
                "seen": [[(each.seconds, each.sums_D) for each in step] for step in known.seen],
            }
            for call, known in self._learned.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(said))

    @classmethod
    def read(cls, path: Path) -> LearnedCosts:
        """What :meth:`write` has written.

        Raises:
            PaddingDataError: it cannot be read, or holds something else.
        """
        costs = cls()
        try:
            for call, said in json.loads(path.read_text(encoding="utf-8")).items():
                costs._learned[call] = _learned(said)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise PaddingDataError(
                f"{path}: no costs of a job with padding.cost_model=measured ({error}). Name the {FILE} of one of its "
                "checkpoints."
            ) from error
        return costs

    def fitted(self) -> dict[str, MeasuredCost]:
        """The newest fit of each call, used or not."""
        return {call: known.fitted for call, known in self._learned.items() if known.fitted is not None}


def _learned(said: dict[str, Any]) -> _Learned:
    known = _Learned(fitted=None if said["cost"] is None else MeasuredCost(**said["cost"]), used=bool(said["used"]))
    known.foretold.extend([(s, fit, formula) for s, fit, formula in step] for step in said["foretold"])
    for step in said["seen"]:
        known.seen.append([Measurement(seconds=s, sums_D=tuple((t, q) for t, q in sums)) for s, sums in step])
    return known


def _told_together(laps: Iterable[Lap]) -> list[list[Lap]]:
    """Each lap by itself, or where waiting is not told apart, those of a micro-batch on all ranks."""
    alone, by_level = [], defaultdict(list)
    for lap in laps:
        if lap.busy_s is not None:
            alone.append([lap])
        else:
            by_level[lap.mini_batch, lap.micro_batch].append(lap)
    return alone + list(by_level.values())


def _seconds(laps: Sequence[Lap]) -> float:
    return max(lap.seconds if lap.busy_s is None else lap.busy_s for lap in laps)


def _measurement(laps: Sequence[Lap]) -> Measurement:
    return Measurement.of(_seconds(laps), [lap.computed_tokens for lap in laps])


def _foretold(laps: Sequence[Lap], fitted: MeasuredCost, formula: CostModel) -> Foretold:
    by_fit, by_formula = (
        max(micro_batch_cost(cost, lap.computed_tokens) for lap in laps) for cost in (fitted, formula)
    )
    return _seconds(laps), by_fit / NANOSECONDS, float(by_formula)
