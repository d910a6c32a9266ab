"""Laps in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Source: "Trace Event Format", complete events (``"ph": "X"``) and metadata events (``"ph": "M"``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from verl_padding.timing.laps import Lap, TimedStep


def chrome_trace(steps: Iterable[TimedStep]) -> dict[str, Any]:
    """A process for each worker call, and in it a thread for each rank; times are in microseconds since the first lap.

    What a rank waited inside of a lap stands at the lap's end, in one piece.
    """
    timed = list(steps)
    laps = [lap for step in timed for lap in step.laps]
    calls = list(dict.fromkeys(call for step in timed for call in step.calls))
    first = min((lap.start_s for lap in laps), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": call}} for number, call in enumerate(calls)
    ]
    for number, call in enumerate(calls):
        for rank in sorted({lap.rank for lap in laps if lap.call == call}):
            named = {"ph": "M", "name": "thread_name", "pid": number, "tid": rank, "args": {"name": f"rank {rank}"}}
            events.append(named)
    for lap in laps:
        events.extend(_events(lap, calls.index(lap.call), first))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(lap: Lap, process: int, first: float) -> Iterator[dict[str, Any]]:
    place = {"ph": "X", "cat": lap.call, "pid": process, "tid": lap.rank}
    begin = (lap.start_s - first) * 1e6
    yield {
        **place,
        "name": f"mini-batch {lap.mini_batch}, micro-batch {lap.micro_batch}",
        "ts": begin,
        "dur": lap.seconds * 1e6,
        "args": {
            "rows": list(lap.rows),
            "pads": lap.pads,
            "computed_tokens": lap.tokens,
            "forward_s": lap.forward_s,
            "busy_s": lap.busy_s,
            "reserved_bytes": lap.reserved_bytes,
            "allocated_bytes": lap.allocated_bytes,
        },
    }
    if lap.busy_s is not None and lap.busy_s < lap.seconds:
        waited = lap.seconds - lap.busy_s
        yield {**place, "name": "waiting", "ts": begin + lap.busy_s * 1e6, "dur": waited * 1e6}
