"""Ends a job one of whose actors has died; verl or TransferQueue would wait for it for minutes, or
forever."""

import logging
import signal
import threading
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
"""Seconds between two looks at the actors."""
REPEAT_S = 15.0
"""Seconds after which the trainer is interrupted again: its clean-up may wait for the lost actor,
too."""
_SIGNAL = signal.SIGURG
"""Interrupts the main thread. By default a process ignores it, and nothing else sends it."""


def actors_of(trainer: Any) -> dict[str, list[ActorHandle]]:
    """The actors that a trainer of verl cannot go on without, by what they are."""
    managers = trainer._rollout_server_managers()
    loops = getattr(trainer, "agent_loop_manager", None)
    rewards = getattr(trainer, "reward_loop_manager", None)
    teachers = getattr(trainer, "teacher_model_manager", None)
    found = {name: getattr(getattr(trainer, name, None), "workers", []) for name in WORKER_GROUPS}
    found |= {
        "agent loop worker": getattr(loops, "agent_loop_workers", []),
        "reward loop worker": getattr(rewards, "reward_loop_workers", []),
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

    Ray reports a death to this process, so a look costs nothing. An actor that restarts, or that
    its holder has replaced, is not dead.

    Args:
        actors: returns the actors that are held now, by what they are.
        on_loss: is called in the thread with the lost actor, in words, before the interrupt.
    """

    def __init__(
        self,
        actors: Callable[[], Mapping[str, Sequence[ActorHandle]]],
        on_loss: Callable[[str], object] = lambda _: None,
    ):
        self._actors, self._on_loss = actors, on_loss
        self._ready: dict[ActorHandle, Any] = {}
        self._suspects: set[ActorHandle] = set()
        self._ended = threading.Event()
        self.lost: str | None = None

    @contextmanager
    def interrupting_main_thread(self) -> Iterator[None]:
        """For a with-block in the main thread, which alone can be interrupted; others run
        unwatched.

        Raises:
            LostActorError: an actor has died; with its name and Ray's reason.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.warning("verl_padding: actors are not watched outside of the main thread")
            yield
            return
        before = signal.signal(_SIGNAL, self._interrupt)
        main_thread = (threading.get_ident(),)
        thread = threading.Thread(
            target=self._watch, args=main_thread, daemon=True, name="actor watch"
        )
        thread.start()
        try:
            try:
                yield
            finally:
                self._ended.set()  # before anything else here, which no interrupt may hit
                thread.join()
        except BaseException as error:
            if self.lost is not None:
                raise LostActorError(self.lost) from error
            raise
        finally:
            signal.signal(_SIGNAL, before or signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._ended.is_set():
            # ray.get and ray.wait pass on no other exception of a signal's handler.
            raise KeyboardInterrupt(self.lost)

    def _watch(self, main_thread: int) -> None:
        while self.lost is None and not self._ended.wait(PERIOD_S):
            self._find_lost()
        if self.lost is not None:
            self._on_loss(self.lost)
        while not self._ended.is_set():
            logger.error("verl_padding: %s", self.lost)
            signal.pthread_kill(main_thread, _SIGNAL)
            self._ended.wait(REPEAT_S)

    def _find_lost(self) -> None:
        """Looks for an actor that was dead at the last look, too, and is still held."""
        held = {handle: what for what, handles in self._actors().items() for handle in handles}
        # Ray reports the death of an actor that this process has called at least once.
        self._ready = {each: self._ready.get(each) or each.__ray_ready__.remote() for each in held}
        dead = {handle for handle in held if handle._get_local_state() == ActorTableData.DEAD}
        for handle in dead & self._suspects:
            try:
                ray.get(handle.__ray_ready__.remote(), timeout=PERIOD_S)
            except ray.exceptions.RayError as error:
                self.lost = f"{held[handle]}: {' '.join(str(error).split())}"
        self._suspects = dead
