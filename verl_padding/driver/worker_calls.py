"""Worker groups whose batch calls get the padded batch, while the trainer goes on with the real
rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from torch.utils._pytree import tree_leaves
from verl.single_controller.base.worker_group import WorkerGroup

from verl_padding.driver.planned_update import PlannedUpdate
from verl_padding.errors import PaddingDataError, PaddingError, plural
from verl_padding.job.calls import CALLS, WORKER_GROUPS, WorkerCall
from verl_padding.job.savings import PACKER, SHARING
from verl_padding.job.verl_check import FIX
from verl_padding.job.verl_job import VerlJob
from verl_padding.pads.padded_batch import NO_ADAPTER
from verl_padding.pads.planned_call import CALL
from verl_padding.pads.queue import KVBatchMeta, n_rows, read_rows, rows_like
from verl_padding.plan import Layout
from verl_padding.worker.cross_contamination import BRANCH_LIMIT, check_cross_contamination
from verl_padding.worker.padded_engine import (
    SCHEDULER_STEPS,
    STEPS,
    TOKENS,
    WORK,
    read_work,
    start_call,
)
from verl_padding.worker.worker_check import (
    INCOMPATIBILITIES,
    check_in_worker,
    find_incompatibilities,
)

CALL_OF_METHOD = {call.method: call for call in CALLS}
"""Method of verl's worker groups -> the call that is planned."""


UpdateFor = Callable[[str, KVBatchMeta], PlannedUpdate]
"""The update that has planned a call, by its name in the plan and its rows."""


class PaddedWorkerGroup:
    """Wraps a worker group of verl: its batch calls take real rows and send the padded ones.

    So verl's trainer methods run as they are, and only a worker call can see a pad. A batch that is
    not in TransferQueue goes through. After each call, workers tell what they have done. Calls that
    bring rows in TransferQueue and that the update that runs has not planned are refused, and so is
    each one where ``update_for`` is None.
    """

    def __init__(self, worker_group: Any, update_for: UpdateFor | None = None):
        self._worker_group, self._update_for = worker_group, update_for

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._worker_group, name)
        if name in CALL_OF_METHOD and self._update_for is not None:
            return partial(self._call, CALL_OF_METHOD[name], target)
        return partial(_refuse_rows, target) if callable(target) else target

    def _call(
        self, call: WorkerCall, target: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(batch, KVBatchMeta):
            return target(batch, *args, **kwargs)
        assert self._update_for is not None, "a group whose calls are planned"
        update = self._update_for(call.name, batch)
        self._worker_group.execute_with_func_generator(start_call)
        sent = update.worker_batch(call.name, batch)
        # verl leaves this flag in the batch. The critic's pass, which comes next, would read it: a
        # LoRA critic would compute values without its adapter, with no word in the log.
        batch.extra_info.pop(NO_ADAPTER, None)
        output = target(sent, *args, **kwargs)
        # The critic's calls answer with a future of each rank's answer, for which verl waits next.
        answers = ray.get(getattr(output, "futures", []))
        work = self._worker_group.execute_with_func_generator(read_work).non_tensor_batch[WORK]
        epochs = sent.extra_info.get("epochs", 1) if call.trains else 1
        check_steps(call, update.plan.layouts[call.name], epochs, work)
        update.note_work(call.name, sum(done[TOKENS] for done in work), epochs)
        if call.trains:
            return output
        if isinstance(output, KVBatchMeta):
            answers = [output]
            output = rows_like(output, batch.keys, batch.tags)
            output.extra_info.pop(CALL, None)
        if (n_outputs := sum(map(n_rows, answers))) != len(sent):
            raise PaddingDataError(
                f"worker call {call.name!r}: outputs of {n_outputs} came back for "
                f"{plural(len(sent), 'row')} sent. See the workers' logs."
            )
        return output


def _refuse_rows(target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Makes a call that is not planned, unless it brings rows in TransferQueue."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, KVBatchMeta):
            raise unplanned(getattr(target, "__name__", type(target).__name__), leaf)
    return target(*args, **kwargs)


def unplanned(call: str, batch: KVBatchMeta) -> PaddingDataError:
    """What refuses a worker call whose rows would reach workers without pads."""
    return PaddingDataError(
        f"worker call {call!r}: {plural(len(batch), 'row')} in TransferQueue that are not those of "
        "a step, or a call that its plan does not have. Send workers the rows' data as a "
        "TensorDict, or train without +padding."
    )


def check_steps(
    call: WorkerCall, layout: Layout, epochs: int, work: Sequence[Counter[str]]
) -> None:
    """Refuses a rank that has taken other optimizer steps than planned, or not one step of the
    scheduler of the learning rate after them, with a PaddingError."""
    planned = (epochs * layout.n_mini_batches, 1) if call.trains else (0, 0)
    for rank, done in enumerate(work):
        if (taken := (done[STEPS], done[SCHEDULER_STEPS])) != planned:
            raise PaddingError(
                f"worker call {call.name!r}: rank {rank} took {taken} (optimizer, scheduler) "
                f"steps, but {planned} are planned. {FIX}"
            )


def dp_size(worker_group: Any, mesh_name: str) -> int:
    """Data-parallel ranks of a worker group, as verl's dispatch asks for them; the answer is kept
    where it looks."""
    if mesh_name not in worker_group._dispatch_info:
        worker_group._dispatch_info[mesh_name] = worker_group._query_dispatch_info(mesh_name)
    return int(max(worker_group._dispatch_info[mesh_name])) + 1


def wrap_worker_groups(
    trainer: Any, job: VerlJob, update_for: UpdateFor
) -> list[PaddedWorkerGroup]:
    """Checks the workers of a trainer after its set-up, and wraps its worker groups.

    Returns: each group once: actor and reference may be one object, and verl asks whether they are.
    """
    wrapped: dict[int, PaddedWorkerGroup] = {}
    for name in WORKER_GROUPS.values():
        group = getattr(trainer, name, None)
        if group is None:
            continue
        if id(group) not in wrapped:
            group.execute_with_func_generator(check_in_worker)
            answer = group.execute_with_func_generator(find_incompatibilities(job.savings.on))
            block_savings(job, answer)
            wrapped[id(group)] = PaddedWorkerGroup(group, update_for)
        setattr(trainer, name, wrapped[id(group)])
    for name, value in [*vars(trainer).items()]:
        if isinstance(value, WorkerGroup):
            setattr(trainer, name, PaddedWorkerGroup(value))
    return list(wrapped.values())


def block_savings(job: VerlJob, answer: Any) -> None:
    """Blocks what the workers have answered that blocks a saving, and what needs that saving."""
    for of_rank in answer.non_tensor_batch.get(INCOMPATIBILITIES, ()):
        for saving, incompatibility in of_rank:
            job.savings.block(saving, [incompatibility])
    if not job.savings.is_on(PACKER):
        job.savings.block(SHARING, job.savings.incompatibilities[PACKER])


def probe_models(worker_groups: list[PaddedWorkerGroup], job: VerlJob, batch: KVBatchMeta) -> None:
    """Has each model show, on the position ids of a batch, that it keeps packed rows apart, and
    whether rows that branch may share what is before."""
    (row,) = read_rows(batch.keys[:1], batch.partition_id, ["position_ids"])
    probe = check_cross_contamination(row["position_ids"].shape[:-1], shares=job.shares)
    for worker_group in worker_groups:
        answer = worker_group.execute_with_func_generator(probe)
        block_savings(job, answer)
        for why in filter(None, answer.non_tensor_batch[BRANCH_LIMIT]):
            job.forbid_branches(str(why))
