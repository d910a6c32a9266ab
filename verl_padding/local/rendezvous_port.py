"""Patch of ``verl.single_controller.ray.base`` (verl 0.9): ranks meet at a port that nothing else is given.

verl asks the system for a free port, gives it back, and starts the workers. Until the first of them listens there, some
ten seconds of imports later, the system may give the port to whoever opens a connection on this machine: the processes
of Ray and TransferQueue open hundreds, more of them where two jobs start at once. The ranks then meet a stranger
("Ping failed, invalid value returned from server"), and the job ends.
"""

import random
from types import ModuleType
from typing import Any

import wrapt

FIRST_PORT, PAST_LAST_PORT = 20_000, 32_768
"""Above the ports that ``ray start`` keeps for its workers (10002 to 19999), below those that Linux (32768 and up) and
macOS (49152 and up) give away."""
_LATEST_START = PAST_LAST_PORT - 1_000


def keep_the_port_free(ray_base: ModuleType) -> None:
    """Has verl look for a group's port between :data:`FIRST_PORT` and :data:`PAST_LAST_PORT`.

    verl takes the first free one of a range. Each group's begins elsewhere, by the system's random numbers: two jobs of
    one seed that start at once would look at the same ports.
    """
    draw = random.SystemRandom()

    def with_range(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs.setdefault("master_port_range", [draw.randrange(FIRST_PORT, _LATEST_START), PAST_LAST_PORT])
        wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(ray_base, "RayWorkerGroup.__init__", with_range)
