"""Costs that a job learns from its own clock, call by call, and keeps with its checkpoints."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_padding.errors import PaddingDataError
from verl_padding.plan.cost import CostModel
from verl_padding.plan.measured_cost import MeasuredCost, Measurement, fit_cost
from verl_padding.timing.figures import measured_figures
from verl_padding.timing.laps import Lap, TimedStep

FILE = "padding_costs.json"
"""In the folder of a checkpoint."""
WINDOW = 8
"""Steps that a fit looks back, and over which its errors are compared with the formula's."""
MOST = 4096
"""Measurements of a call that a fit takes from its window; of more, an even share."""


@dataclass
class _Learned:
    """What is known of one call."""

    seen: deque[list[Measurement]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    errors: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Of each step: how wrong the fit of the steps before it was, and how wrong the formula."""
    fitted: MeasuredCost | None = None
    used: bool = False


class LearnedCosts:
    """What micro-batches of each call cost, by the steps seen so far.

    After each step the fit of the steps before it and the formula both foretell the step's seconds. Once the fit has
    been the better one, over the steps of the window, the plan uses it; where the formula is better again, that. The
    same laps give the same costs.
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
            if known.fitted is not None:
                errors = [measured_figures(laps, model).prediction_error for model in (known.fitted, formulas[call])]
                known.errors.append((errors[0], errors[1]))
            known.seen.append(measurements_of(laps))
            seen = [each for step in known.seen for each in step]
            known.fitted = fit_cost(seen[:: -(-len(seen) // MOST)]) or known.fitted
            fit, formula = (sum(each[of] for each in known.errors) / max(len(known.errors), 1) for of in (0, 1))
            if known.fitted is not None and known.errors and known.used != (fit < formula):
                known.used = not known.used
                told.append(
                    f"from step {timed.step + 1} on, {call} is planned by "
                    f"{'measured costs' if known.used else 'the formula'}: over the last "
                    f"{len(known.errors)} steps measured costs were off by {fit:.3f}, the formula by {formula:.3f}"
                )
        return told

    def write(self, path: Path) -> None:
        """Writes all that is known."""
        said = {
            call: {
                "cost": None if known.fitted is None else asdict(known.fitted),
                "used": known.used,
                "errors": list(known.errors),
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
    known.errors.extend((fit, formula) for fit, formula in said["errors"])
    for step in said["seen"]:
        known.seen.append([Measurement(seconds=s, sums_D=tuple((t, q) for t, q in sums)) for s, sums in step])
    return known


def measurements_of(laps: Iterable[Lap]) -> list[Measurement]:
    """A measurement of each lap, or where waiting is not told apart, of each micro-batch of all ranks together."""
    by_level: dict[tuple[int, int], list[Lap]] = defaultdict(list)
    found = []
    for lap in laps:
        if lap.busy_s is not None:
            found.append(Measurement.of(lap.busy_s, [lap.computed_tokens]))
        else:
            by_level[lap.mini_batch, lap.micro_batch].append(lap)
    return found + [_of_level(level) for level in by_level.values()]


def _of_level(laps: Sequence[Lap]) -> Measurement:
    return Measurement.of(max(lap.seconds for lap in laps), [lap.computed_tokens for lap in laps])
