"""A dead actor ends the wait for it, by name; a restarted, replaced or rightly ended one does
not."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from verl.trainer.ppo import v1

from tests.support.light_actor import Worker
from verl_padding.errors import LostActorError
from verl_padding.pads.queue import actors_of_queue
from verl_padding.verl_fixes import actor_watch
from verl_padding.verl_fixes.actor_watch import ActorWatch, actors_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

LONG_S = 60


@pytest.fixture
def worker():
    handle = Worker.options(name="a worker").remote()
    ray.get(handle.pid.remote())
    yield handle
    ray.kill(handle)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(actor_watch, "PERIOD_S", 0.3)
    monkeypatch.setattr(actor_watch, "REPEAT_S", 2.0)


def kill(actor) -> None:
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)


def soon(function, *args) -> None:
    threading.Timer(0.5, function, args).start()


WAITS = {
    "ray.get": lambda other: ray.get(other.work.remote(LONG_S)),
    "lock": lambda other: Future().result(LONG_S),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_whatever_the_trainer_waits_in_a_dead_actor_ends_it_within_seconds(wait, worker):
    other = Worker.remote()
    ray.get(other.pid.remote())
    words = []
    watch = ActorWatch(lambda: {"agent loop worker": [worker], "rank": [other]}, words.append)
    pid = ray.get(worker.pid.remote())
    started = time.monotonic()
    soon(os.kill, pid, signal.SIGKILL)
    with (
        pytest.raises(
            LostActorError, match=rf"^agent loop worker: .*pid: {pid} name: a worker"
        ) as raised,
        watch.interrupting_main_thread(),
    ):
        wait(other)
    assert time.monotonic() - started < LONG_S / 3
    assert isinstance(raised.value.__cause__, KeyboardInterrupt)
    assert words == [str(raised.value)]
    ray.kill(other)


def test_clearing_up_that_waits_for_the_dead_actor_is_interrupted_too(worker):
    watch = ActorWatch(lambda: {"storage": [worker]})
    interrupted = []
    started = time.monotonic()

    def train_and_clear_up() -> None:
        for _ in range(2):
            try:
                time.sleep(LONG_S)
            except KeyboardInterrupt:
                interrupted.append(time.monotonic() - started)
        raise ValueError("and then what it led to")

    kill(worker)
    with pytest.raises(LostActorError), watch.interrupting_main_thread():
        train_and_clear_up()
    assert len(interrupted) == 2
    assert interrupted[1] < LONG_S / 2


def test_an_actor_that_restarts_is_not_lost():
    worker = Worker.options(max_restarts=1).remote()
    watch = ActorWatch(lambda: {"worker": [worker]})
    with watch.interrupting_main_thread():
        first = ray.get(worker.pid.remote())
        os.kill(first, signal.SIGKILL)
        deadline, second = time.monotonic() + 120, first
        while second == first and time.monotonic() < deadline:
            time.sleep(0.5)
            try:
                second = ray.get(worker.pid.remote())
            except ray.exceptions.RayActorError:
                continue
        time.sleep(1)
    assert second != first, "it was never restarted"
    assert watch.lost is None
    ray.kill(worker)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_other_errors_pass_as_they_are(error, worker):
    watch = ActorWatch(lambda: {"worker": [worker]})
    with pytest.raises(error, match="the user's own"), watch.interrupting_main_thread():
        raise error("the user's own")


def test_all_actors_of_a_trainer_are_found_wherever_verl_keeps_them(worker):
    manager = SimpleNamespace(server_handles=[worker], global_load_balancer=worker)
    trainer = SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(workers=[worker, worker]),
        critic_wg=None,
        agent_loop_manager=SimpleNamespace(agent_loop_workers=[worker]),
        reward_loop_manager=SimpleNamespace(reward_loop_workers=[worker]),
        teacher_model_manager=SimpleNamespace(
            server_handles={"a": [worker]}, load_balancer_handle={"a": worker}
        ),
        _rollout_server_managers=lambda: [manager, manager],
    )
    assert {what: len(found) for what, found in actors_of(trainer).items()} == {
        "actor_rollout_wg": 2,
        "agent loop worker": 1,
        "reward loop worker": 1,
        "rollout server": 2,
        "load balancer": 2,
        "teacher server": 1,
        "load balancer of teachers": 1,
    }
    queue = actors_of_queue()
    assert {what: len(found) for what, found in queue.items()} == {
        "TransferQueue's controller": 1,
        "TransferQueue's storage": 1,
    }
    assert all(
        ray.get(actor.__ray_ready__.remote()) for actors in queue.values() for actor in actors
    )


def test_verl_does_not_look_after_its_actors_by_itself():
    # When this fails, verl reads of deaths: see whether its jobs now end by themselves, and the
    # watch can go.
    sources = [path.read_text() for path in Path(v1.__file__).parent.glob("*.py")]
    assert len(sources) > 5
    assert not [
        source for source in sources if "RayActorError" in source or "ActorDiedError" in source
    ]
