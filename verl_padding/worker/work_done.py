"""What workers have done in a call: the tokens that reached their models, and the steps of
optimizers and of schedulers."""

from collections import Counter
from typing import Any

from verl_padding.worker.training_workers import answer, training_workers

WORK = "work"
"""Name of what workers answer: of each rank a ``Counter`` of :data:`TOKENS`, :data:`STEPS` and
:data:`SCHEDULER_STEPS`."""
TOKENS, STEPS, SCHEDULER_STEPS = "tokens", "optimizer_steps", "scheduler_steps"


def start_call(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``: what a worker tells of a call is of that call
    alone."""
    for training_worker in training_workers(worker).values():
        training_worker.engine.done.clear()
    return answer()


def read_work(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``: what a worker has done since :func:`start_call`,
    as ``non_tensor_batch[WORK]``."""
    done: Counter[str] = Counter()
    for training_worker in training_workers(worker).values():
        engine = training_worker.engine
        engine_work = Counter(engine.done)
        # Each stage of a virtual pipeline that a rank has gets the tokens of a micro-batch.
        engine_work[TOKENS] //= len(engine.module) if isinstance(engine.module, list) else 1
        if not engine.is_mp_src_rank_with_outputs():
            engine_work[TOKENS] = 0  # of ranks that share their rows, only one counts them
        done.update(engine_work)
    return answer(**{WORK: done})
