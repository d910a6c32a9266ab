"""Costs that a job learns from its own clock, call by call, and keeps with its checkpoints."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from verl_padding.errors import PaddingDataError
from verl_padding.plan.cost import CostModel
from verl_padding.plan.counted import counted
from verl_padding.plan.measured_cost import FEW, MeasuredCost, Measurement, fit_cost
from verl_padding.timing.laps import Lap, Measured, laps_by_call, measurements, prediction_error

FILE = "padding_costs.json"
"""In the folder of a checkpoint."""
WINDOW = 8
"""Steps (local updates) that a fit looks back in any case; errors are compared over all that it looks at."""
MEMORY = 100
"""Steps after which what is beyond the window is forgotten, and another fill may be tried again."""
LEAST_STEPS = 2
"""Fewer change no plan: the first one also warms up."""
SWITCH_MARGIN = 0.95
"""A plan changes over to what has at most this share of the other's errors."""
MOST = 4096
"""Measurements of a call that a fit takes; of more, an even share."""


@dataclass
class _Learned:
    """What is known of one call."""

    steps: dict[int, Sequence[Measured]] = field(default_factory=dict)
    """By their numbers, from 1: those of the window, and before it the newest of each fullness that the window has none
    of; none too old."""
    fitted: MeasuredCost | None = None
    used: bool = False
    trial_fill: int = 0
    """Tokens of a micro-batch of the next step, if that one is to try so many; else 0."""
    tried: int = 0
    """Number of the step after which the last such step was asked for; 0 for never."""

    def add(self, seen: Sequence[Measured]) -> None:
        """Takes a step in, and drops those that are no longer looked at."""
        number = max(self.steps, default=0) + 1
        steps = {**self.steps, number: seen}
        newest = {_fullness(step): each for each, step in steps.items() if number - each < MEMORY}
        self.steps = {each: step for each, step in steps.items() if number - each < WINDOW or each in newest.values()}

    def seen(self) -> list[Measured]:
        """The micro-batches that a fit takes, by what they hold: every second one is then an even share of the full and
        the empty ones. In the order of a step, levels may take turns."""
        seen = [each for step in self.steps.values() for each in step]
        seen.sort(key=lambda each: (each[0].fill, each[0].sums_D))
        return seen[:: -(-len(seen) // MOST)]

    def fill_to_try(self) -> int:
        """Half the tokens of the fullest micro-batches, if all were about as full and none was tried lately; else 0. To
        a fit, what does not depend on a micro-batch's tokens, grows with them or with their square is then the same."""
        if self.tried and max(self.steps) - self.tried < MEMORY:
            return 0
        emptiest, fullest = np.quantile([measured.fill for measured, _ in self.seen()], [FEW, 1 - FEW])
        return int(fullest) // 2 if 2 * emptiest > fullest else 0


class LearnedCosts:
    """What micro-batches of each call cost, by the steps seen so far; the same laps give the same costs. After each
    step a fit to the micro-batches of the steps so far, and the formula, are compared on micro-batches the fit has not
    seen. The plan uses one of them, and switches where the other is better by `SWITCH_MARGIN`. Where all micro-batches
    were about equally full, one step in `MEMORY` tries half as full ones."""

    def __init__(self) -> None:
        self._learned: dict[str, _Learned] = defaultdict(_Learned)

    def cost_of(self, call: str, cut_by_plan: bool) -> MeasuredCost | None:
        """The cost that the plan of a call is to use, None for the formula; a trial only if the plan cuts the call."""
        known = self._learned.get(call)
        if known is None or known.fitted is None:
            return None
        trial_fill = known.trial_fill if cut_by_plan else 0
        return replace(known.fitted, trial_fill=trial_fill) if known.used or trial_fill else None

    def learn(self, laps: Sequence[Lap], formulas: Mapping[str, CostModel], cut_by_plan: Collection[str]) -> list[str]:
        """Learns from the laps of a local update; returns a sentence for each call whose plan changes over, or that is
        to try another fill. ``formulas`` has what the plan of each call uses while nothing better is known, and
        ``cut_by_plan`` the calls whose micro-batches are as full as the plan says: others can try none."""
        changes = []
        for call, of_call in laps_by_call(laps).items():
            known = self._learned[call]
            known.add(measurements(of_call, formulas[call]))
            known.fitted = fit_cost([measured for measured, _ in known.seen()]) or known.fitted
            known.trial_fill = 0
            if len(known.steps) < LEAST_STEPS or (errors := _errors(known.seen())) is None:
                continue
            of_fits, of_formula = errors
            in_use, other = (of_fits, of_formula) if known.used else (of_formula, of_fits)
            if other < SWITCH_MARGIN * in_use:
                known.used = not known.used
                by = "measured costs" if known.used else "the formula"
                changes.append(
                    f"from the next update on, {call} is planned by {by}: over {counted(len(known.steps), 'update')} "
                    f"measured costs were off by {of_fits:.3f}, the formula by {of_formula:.3f}"
                )
            if call in cut_by_plan and (fill := known.fill_to_try()):
                known.trial_fill, known.tried = fill, max(known.steps)
                changes.append(
                    f"the next update tries micro-batches of {fill} tokens in {call}, or as many as its rows need: all "
                    "were about twice as full, which hides what depends on how full they are"
                )
        return changes

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({call: asdict(known) for call, known in self._learned.items()}))

    @classmethod
    def read(cls, path: Path) -> Self:
        """What :meth:`write` has written; raises a PaddingDataError if it cannot be read, or holds something else."""
        costs = cls()
        try:
            for call, known in json.loads(path.read_text(encoding="utf-8")).items():
                known["steps"] = {int(number): list(map(_measured, seen)) for number, seen in known["steps"].items()}
                known["fitted"] = known["fitted"] and MeasuredCost(**known["fitted"])
                costs._learned[call] = _Learned(**known)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise PaddingDataError(
                f"{path}: no costs of a job with padding.cost_model=measured ({error}). Name the {FILE} of one of its "
                "checkpoints; a job that is to go on from this one learns anew once the file is moved away."
            ) from error
        return costs

    def fitted(self) -> dict[str, MeasuredCost]:
        """The newest fit of each call, used or not."""
        return {call: known.fitted for call, known in self._learned.items() if known.fitted is not None}


def _measured(read: Sequence[Any]) -> Measured:
    measurement, cost = read
    return Measurement(seconds=measurement["seconds"], sums_D=tuple(map(tuple, measurement["sums_D"]))), cost


def _fullness(seen: Sequence[Measured]) -> int:
    """Which power of two the median of the fills has reached."""
    return int(np.median([measured.fill for measured, _ in seen])).bit_length()


def _errors(seen: Sequence[Measured]) -> tuple[float, float] | None:
    """How wrong fits are, and the formula, as shares of the measured seconds; None where too little is known to fit.
    One half of the measurements is predicted by a fit to the other, and the other way round; they come by what they
    hold, so that both halves have full ones and empty ones."""
    halves = seen[::2], seen[1::2]
    by_fit: list[Measured] = []
    for fitted_to, half in (halves, halves[::-1]):
        if (fit := fit_cost([measured for measured, _ in fitted_to])) is None:
            return None
        by_fit += [(measured, fit.predict(measured)) for measured, _ in half]
    return prediction_error(by_fit), prediction_error(seen)
