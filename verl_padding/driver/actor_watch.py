"""Ends a job one of whose actors has died; verl or TransferQueue would wait for it for minutes, or forever."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.core.generated.gcs_pb2 import ActorTableData

from verl_padding.errors import LostActorError
from verl_padding.job.calls import WORKER_GROUPS

logger = logging.getLogger(__name__)

PERIOD_S = 3.0
"""Seconds between two looks at the actors; an actor that is dead in two of them, and still held, ends the job."""
REPEAT_S = 15.0
"""Seconds after which the trainer is interrupted again: clearing up after a lost actor may wait for it as well."""
_SIGNAL = signal.SIGURG
"""Signal that interrupts the main thread: a process that does not handle it ignores it, and nothing else sends it."""


def actors_of(trainer: Any) -> dict[str, list[ActorHandle]]:
    """The actors that a trainer of verl cannot go on without, by what they are."""
    managers = trainer._rollout_server_managers()
    teachers = getattr(trainer, "teacher_model_manager", None)
    found = {
        **{name: getattr(getattr(trainer, name, None), "workers", []) for name in WORKER_GROUPS},
        "agent loop worker": getattr(getattr(trainer, "agent_loop_manager", None), "agent_loop_workers", []),
        "reward loop worker": getattr(getattr(trainer, "reward_loop_manager", None), "reward_loop_workers", []),
        "rollout server": [getattr(manager, "server_handles", []) for manager in managers],
        "load balancer": [getattr(manager, "global_load_balancer", None) for manager in managers],
        "teacher server": getattr(teachers, "server_handles", {}),
        "load balancer of teachers": getattr(teachers, "load_balancer_handle", {}),
    }
    return {what: handles for what, actors in found.items() if (handles := _handles(actors))}


def _handles(actors: Any) -> list[ActorHandle]:
    """The actors in lists and dicts of any depth; anything else is left out."""
    if isinstance(actors, Mapping):
        return _handles(list(actors.values()))
    if isinstance(actors, list | tuple):
        return [handle for actor in actors for handle in _handles(actor)]
    return [actors] if isinstance(actors, ActorHandle) else []


class ActorWatch:
    """Looks at actors from a thread, and interrupts the main thread when one of them has died.

    Ray reports a death to this process, so a look costs nothing. An actor that restarts, or one that its holder has
    replaced, is not dead: ``actors`` returns those that are held now, by what they are.
    """

    def __init__(self, actors: Callable[[], Mapping[str, Sequence[ActorHandle]]]):
        self._actors = actors
        self._started: dict[ActorHandle, Any] = {}
        self._suspects: set[ActorHandle] = set()
        self._ended = threading.Event()
        self.lost: str | None = None
        """The actor that has died, in words."""

    @contextmanager
    def over(self) -> Iterator[None]:
        """Watches over a with-block in the main thread; in another thread the block runs unwatched, with a warning.

        If an actor dies, raises a LostActorError with its name and Ray's reason, whose cause is what the block raised
        when it was interrupted, or by itself.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.warning("verl_padding: actors are not watched: only waiting in the main thread can be interrupted")
            yield
            return
        self._ended.clear()
        before = signal.signal(_SIGNAL, self._interrupt)
        thread = threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True, name="actor watch")
        thread.start()
        try:
            try:
                yield
            finally:
                self._ended.set()
                thread.join()
        except BaseException as error:
            if self.lost is None and isinstance(error, ray.exceptions.RayActorError):
                # A call has met the dead actor before the watch did.
                self._find_lost()
                time.sleep(PERIOD_S)
                self._find_lost()
            if self.lost is not None:
                raise LostActorError(self.lost) from error
            raise
        finally:
            signal.signal(_SIGNAL, before or signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.lost is not None and not self._ended.is_set():
            # As Ray does to a task that is cancelled: ray.get and ray.wait let no other exception through.
            raise KeyboardInterrupt(self.lost)

    def _watch(self, main_thread: int) -> None:
        while self.lost is None and not self._ended.wait(PERIOD_S):
            self._find_lost()
        while not self._ended.is_set():
            logger.error("verl_padding: %s", self.lost)
            signal.pthread_kill(main_thread, _SIGNAL)
            self._ended.wait(REPEAT_S)

    def _find_lost(self) -> None:
        """Looks for an actor that was dead at the last look too and is still held."""
        held = {handle: what for what, handles in self._actors().items() for handle in handles}
        # The first call makes Ray report the actor's death.
        self._started = {handle: self._started.get(handle) or handle.__ray_ready__.remote() for handle in held}
        dead = {handle for handle in held if handle._get_local_state() == ActorTableData.DEAD}
        for handle in dead & self._suspects:
            try:
                ray.get(handle.__ray_ready__.remote(), timeout=PERIOD_S)
            except ray.exceptions.RayError as error:
                self.lost = f"{held[handle]}: {' '.join(str(error).split())}"
        self._suspects = dead
