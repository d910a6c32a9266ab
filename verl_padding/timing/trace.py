"""Laps in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Source: "Trace Event Format", complete events (``"ph": "X"``) and metadata events (``"ph": "M"``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verl_padding.timing.laps import TimedStep


def chrome_trace(steps: Iterable[TimedStep]) -> dict[str, Any]:
    """A process for each worker call, and in it a thread for each rank; times are in microseconds since the first lap.

    What a rank waited inside of a lap stands at the lap's end, in one piece.
    """
    timed = list(steps)
    laps = [lap for step in timed for lap in step.laps]
    calls = list(dict.fromkeys(call for step in timed for call in step.by_call()))
    first = min((lap.start_s for lap in laps), default=0.0)
    events: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        of_call = {"ph": "M", "pid": number}
        events.append({**of_call, "name": "process_name", "args": {"name": call}})
        for rank in sorted({lap.rank for lap in laps if lap.call == call}):
            events.append({**of_call, "name": "thread_name", "tid": rank, "args": {"name": f"rank {rank}"}})
    for lap in laps:
        place = {"ph": "X", "cat": lap.call, "pid": calls.index(lap.call), "tid": lap.rank}
        name = f"mini-batch {lap.mini_batch}, micro-batch {lap.micro_batch}"
        shown = ("rows", "pads", "forward_s", "busy_s", "reserved_bytes", "allocated_bytes")
        about = {"computed_tokens": lap.tokens, **{each: getattr(lap, each) for each in shown}}
        begin, seconds = (lap.start_s - first) * 1e6, lap.seconds * 1e6
        events.append({**place, "name": name, "ts": begin, "dur": seconds, "args": about})
        if lap.busy_s is not None and lap.busy_s < lap.seconds:
            busy = lap.busy_s * 1e6
            events.append({**place, "name": "waiting", "ts": begin + busy, "dur": seconds - busy})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
