"""Worker groups whose batch calls get the padded batch, while the trainer goes on with the real
rows."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import ray
from wrapt import FunctionWrapper

from verl_padding.driver.step_planner import PlannedStep
from verl_padding.errors import PaddingDataError
from verl_padding.job.calls import CALLS, WORKER_GROUPS, WorkerCall
from verl_padding.job.savings import PACKER, SHARING
from verl_padding.job.verl_job import VerlJob
from verl_padding.pads.queue import KVBatchMeta, n_rows, read_rows
from verl_padding.plan.plural import plural
from verl_padding.verl_fixes import position_ids, text_without_image
from verl_padding.worker import (
    log_probs,
    micro_batch_clock,
    mini_batches,
    packed_attention,
    plan_packer,
)
from verl_padding.worker.leak_probe import BRANCHES, probe_for_leaks
from verl_padding.worker.left_out import BLOCKERS, find_blockers
from verl_padding.worker.losses import wrap_worker_loss

CALL_OF_METHOD = {call.method: call for call in CALLS}
"""Method of verl's worker groups -> the call that is planned."""


StepFor = Callable[[str, KVBatchMeta], AbstractContextManager[PlannedStep]]
"""A with-block that has the plan and pads of a call, by its name in the plan and its rows."""


class PaddedWorkerGroup:
    """Wraps a worker group of verl: its batch calls take real rows and send the padded ones.

    So verl's trainer methods run as they are, and only a worker call can see a pad. Everything else
    goes through to the worker group, and so does a batch that is not in TransferQueue; another call
    that brings rows is refused. A call
    outside of a step, or with other rows than the step has planned for it, gets a plan and pads of
    its own, which are gone when it returns. Workers count their peak memory anew for each call:
    verl logs the highest since the process began.
    """

    def __init__(self, worker_group: Any, step_for: StepFor):
        self._worker_group, self._step_for = worker_group, step_for

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._worker_group, name)
        if name in CALL_OF_METHOD:
            return partial(self._call, CALL_OF_METHOD[name], target)
        return FunctionWrapper(target, _refuse_rows) if callable(target) else target

    def _call(
        self, call: WorkerCall, target: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(batch, KVBatchMeta):
            return target(batch, *args, **kwargs)
        with self._step_for(call.name, batch) as step:
            padded = step.padded_for(call.name)
            self._worker_group.execute_with_func_generator(start_peak)
            make = padded.update_call if call.trains else padded.inference_call
            sent = make(call.name, batch)
            output = target(sent, *args, **kwargs)
            # The critic's calls answer with a future of each rank's answer, for which verl waits
            # next; pads that are gone after this block must have been read.
            answers = ray.get(getattr(output, "futures", []))
            if call.trains:
                return output
            is_batch = isinstance(output, KVBatchMeta)
            _check_answers(call.name, [output] if is_batch else answers, sent)
            return padded.real_output(output, batch) if is_batch else output


def _refuse_rows(target: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a call that is not planned, unless it brings rows in TransferQueue."""
    if rows := [each for each in (*args, *kwargs.values()) if isinstance(each, KVBatchMeta)]:
        name = getattr(target, "__name__", type(target).__name__)
        raise PaddingDataError(
            f"worker call {name!r}: {plural(len(rows[0]), 'row')} in TransferQueue would come to "
            f"workers without pads, as no plan knows this call ({', '.join(CALL_OF_METHOD)} are "
            "known). Send it what it reads of the rows, as a TensorDict, or train without +padding."
        )
    return target(*args, **kwargs)


def _check_answers(call: str, answers: Sequence[Any], sent: KVBatchMeta) -> None:
    """Refuses a pass whose workers have not answered for all rows that were sent."""
    if (came := sum(map(n_rows, answers))) != len(sent):
        raise PaddingDataError(
            f"worker call {call!r}: outputs of {came} came back for {plural(len(sent), 'row')} "
            "that were sent. None of them is used. Look into the workers' logs for the reason."
        )


def start_peak(worker: Any) -> Any:
    """For verl's ``execute_with_func_generator``: the peak memory that a call reports is its own,
    not the process's."""
    from verl.protocol import DataProto
    from verl.utils.device import get_torch_device

    if hasattr(get_torch_device(), "reset_peak_memory_stats"):
        get_torch_device().reset_peak_memory_stats()
    return DataProto()


def dp_size(worker_group: Any, mesh_name: str) -> int:
    """Data-parallel ranks of a worker group, as verl's dispatch asks for them; the answer is kept
    where it looks."""
    if mesh_name not in worker_group._dispatch_info:
        worker_group._dispatch_info[mesh_name] = worker_group._query_dispatch_info(mesh_name)
    return int(max(worker_group._dispatch_info[mesh_name])) + 1


def wrap_worker_groups(trainer: Any, job: VerlJob, step_for: StepFor) -> list[PaddedWorkerGroup]:
    """Wraps the worker groups of a trainer, after its set-up, and puts into their workers what
    padded calls need.

    Returns: each group once: actor and reference may be one object, and verl asks whether they are.
    """
    padding = job.padding
    named = {name: getattr(trainer, name, None) for name in WORKER_GROUPS.values()}
    groups = {name: group for name, group in named.items() if group is not None}
    each_group = {id(group): group for group in groups.values()}
    for group in each_group.values():
        block_savings(job, group.execute_with_func_generator(find_blockers(job.savings.on)))
    changes = [wrap_worker_loss(padding.denominator)]
    # Packed attention before the plan's packer: where rows share, that wraps it.
    installed = (mini_batches, packed_attention, log_probs)
    changes += [each.install_in_worker for each in installed]
    if job.has_vision:
        changes += [position_ids.install_in_worker, text_without_image.install_in_worker]
    if job.savings.is_on(PACKER):
        changes.append(plan_packer.install(shares=job.shares))
    if padding.timing:
        changes.append(micro_batch_clock.install_in_worker)
    wrapped: dict[int, PaddedWorkerGroup] = {}
    for number, group in each_group.items():
        for change in changes:
            group.execute_with_func_generator(change)
        wrapped[number] = PaddedWorkerGroup(group, step_for)
    for name, group in groups.items():
        setattr(trainer, name, wrapped[id(group)])
    return list(wrapped.values())


def block_savings(job: VerlJob, answer: Any) -> None:
    """Blocks what the workers have answered that blocks a saving, and what needs that saving."""
    for of_rank in answer.non_tensor_batch.get(BLOCKERS, ()):
        for saving, blocker in of_rank:
            job.savings.block(saving, [blocker])
    if not job.savings.is_on(PACKER):
        job.savings.block(SHARING, job.savings.blockers[PACKER])


def probe_models(worker_groups: list[PaddedWorkerGroup], job: VerlJob, batch: KVBatchMeta) -> bool:
    """Has each model show, on the position ids of a batch, that it keeps packed rows apart.

    Returns: whether rows that part may share what is before.
    """
    (row,) = read_rows(batch.keys[:1], batch.partition_id, ["position_ids"])
    engines = job.engines.items()
    fixes = {role: f"{engine.model_section}.use_remove_padding=False" for role, engine in engines}
    probe = probe_for_leaks(
        row["position_ids"].shape[:-1],
        shares=job.shares,
        fixes=fixes,
        multiples={role: engine.micro_batch_multiple for role, engine in engines},
    )
    answers = [worker_group.execute_with_func_generator(probe) for worker_group in worker_groups]
    for answer in answers:
        block_savings(job, answer)
    return all(answer.non_tensor_batch[BRANCHES].all() for answer in answers)
