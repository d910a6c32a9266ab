"""Worker groups whose batch calls get the padded batch, while the trainer goes on with the real
rows."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import ray

from verl_padding.driver.step_planner import PlannedStep
from verl_padding.errors import PaddingConfigError, PaddingDataError
from verl_padding.job.calls import CALLS, WORKER_GROUPS, WorkerCall
from verl_padding.job.savings import PACKER, SHARING
from verl_padding.job.verl_job import VerlJob
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.pads.queue import KVBatchMeta, n_rows, read_rows
from verl_padding.plan.plural import plural
from verl_padding.verl_fixes import position_ids, text_without_image
from verl_padding.worker import (
    linear_attention,
    log_probs,
    micro_batch_clock,
    mini_batches,
    packed_attention,
    plan_packer,
)
from verl_padding.worker.leak_probe import BRANCHES, probe_for_leaks
from verl_padding.worker.left_out import BLOCKERS, find_blockers
from verl_padding.worker.losses import wrap_worker_loss
from verl_padding.worker.training_workers import for_training_workers

CALL_OF_METHOD = {call.method: call for call in CALLS}
"""Method of verl's worker groups -> the call that is planned."""


class Steps(Protocol):
    """Who has planned the step that runs."""

    @property
    def current(self) -> PlannedStep | None:
        """The step of the local update that runs; None outside of one."""

    def single_call(self, call: str, batch: KVBatchMeta) -> AbstractContextManager[PlannedStep]:
        """A with-block's plan and pads for one call, by its name in the plan, and its rows."""


class PaddedWorkerGroup:
    """Wraps a worker group of verl: its batch calls take real rows and send the padded ones.

    So verl's trainer methods run as they are, and only a worker call can see a pad. Everything else
    goes through to the worker group, and so does a batch that is not in TransferQueue. A call
    outside of a step, or with other rows than the step has planned for it, gets a plan and pads of
    its own, which are gone when it returns. Workers count their peak memory anew for each call:
    verl logs the highest since the process began.
    """

    def __init__(self, worker_group: Any, steps: Steps):
        self._worker_group, self._steps = worker_group, steps

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._worker_group, name)
        return (
            partial(self._call, CALL_OF_METHOD[name], target) if name in CALL_OF_METHOD else target
        )

    def _call(
        self, call: WorkerCall, target: Callable[..., Any], batch: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(batch, KVBatchMeta):
            return target(batch, *args, **kwargs)
        step = self._steps.current
        if step is not None and step.has_planned(call.name, batch):
            return self._send(step.padded_for(call.name), call, target, batch, *args, **kwargs)
        with self._steps.single_call(call.name, batch) as single:
            output = self._send(single.padded_for(call.name), call, target, batch, *args, **kwargs)
            ray.get(
                getattr(output, "futures", [])
            )  # pads are gone after the block: the workers must have read them
            return output

    def _send(
        self,
        padded: PaddedBatch,
        call: WorkerCall,
        target: Callable[..., Any],
        batch: KVBatchMeta,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._worker_group.execute_with_func_generator(start_peak)
        sent = (
            padded.update_call(call.name, batch)
            if call.trains
            else padded.inference_call(call.name, batch)
        )
        output = target(sent, *args, **kwargs)
        return output if call.trains else _real_output(call.name, sent, output, padded, batch)


def _real_output(
    call: str, sent: KVBatchMeta, output: Any, padded: PaddedBatch, batch: KVBatchMeta
) -> Any:
    """What the workers answered for the real rows, once they have answered for all that were
    sent."""
    # The critic's pass answers with a future of each rank's answer, which verl waits for next.
    answers = (
        [output] if isinstance(output, KVBatchMeta) else ray.get(getattr(output, "futures", []))
    )
    if (came := sum(map(n_rows, answers))) != len(sent):
        raise PaddingDataError(
            f"worker call {call!r}: outputs of {came} came back for {plural(len(sent), 'row')} "
            "that were sent. None of them is used. Look into the workers' logs for the reason."
        )
    return padded.real_output(output, batch) if isinstance(output, KVBatchMeta) else output


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


def wrap_worker_groups(trainer: Any, job: VerlJob, steps: Steps) -> list[PaddedWorkerGroup]:
    """Wraps the worker groups of a trainer, after its set-up, and puts into their workers what
    padded calls need.

    Returns: each group once: actor and reference may be one object, and verl asks whether they are.
    """
    padding, planned = job.padding, {role: engine.config for role, engine in job.engines.items()}
    named = {name: getattr(trainer, name, None) for name in WORKER_GROUPS}
    groups = {name: group for name, group in named.items() if group is not None}
    for group in {id(group): group for group in groups.values()}.values():
        group.execute_with_func_generator(check_engines(planned))
        block_savings(job, group.execute_with_func_generator(find_blockers(job.savings.on)))
    changes = [wrap_worker_loss(padding.denominator)]
    # Packed attention before the plan's packer: where rows share, that wraps it.
    installed = (mini_batches, packed_attention, linear_attention, log_probs)
    changes += [each.install_in_worker for each in installed]
    if job.has_vision:
        changes += [position_ids.install_in_worker, text_without_image.install_in_worker]
    if job.savings.is_on(PACKER):
        changes.append(plan_packer.install(shares=job.shares))
    if padding.timing:
        changes.append(micro_batch_clock.install_in_worker)
    wrapped: dict[int, PaddedWorkerGroup] = {}
    for name, worker_group in groups.items():
        if id(worker_group) not in wrapped:
            for change in changes:
                worker_group.execute_with_func_generator(change)
            wrapped[id(worker_group)] = PaddedWorkerGroup(worker_group, steps)
        setattr(trainer, name, wrapped[id(worker_group)])
    return list(wrapped.values())


def block_savings(job: VerlJob, answer: Any) -> None:
    """Blocks what the workers have answered that blocks a saving, and what needs that saving."""
    for of_rank in answer.non_tensor_batch.get(BLOCKERS, ()):
        for saving, blocker in of_rank:
            job.savings.block(saving, [blocker])
    if not job.savings.is_on(PACKER):
        job.savings.block(SHARING, job.savings.blockers[PACKER])


PLANNED = (
    *("strategy", "use_dynamic_bsz", "use_remove_padding", "pad_to_length", "pad_to_length_bucket"),
    *("max_token_len_per_gpu", "micro_batch_size_per_gpu", "max_seqlen_per_dp_cp_rank"),
    *("infer_max_token_len_per_gpu", "infer_micro_batch_size_per_gpu"),
    *("ulysses_sequence_parallel_size", "ulysses_parallel_size", "tensor_model_parallel_size"),
    *("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "dynamic_context_parallel"),
)
"""Fields of verl's engine configs that decide what a worker's micro-batches may hold; no backend
has all of them."""


def check_engines(planned: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Makes a function for verl's ``execute_with_func_generator`` that checks a worker's engines
    against the plan's.

    A value that differs from ``planned``, verl's engine config of each role (``actor``, ``ref``,
    ``critic``) as the driver has it, would silently make other micro-batches.
    """

    def check(role: str, training_worker: Any) -> None:
        has, wanted = training_worker.engine_config, planned.get(role)
        differ = [
            f"{name}={getattr(has, name)!r} (planned: {getattr(wanted, name)!r})"
            for name in PLANNED
            if hasattr(wanted, name) and getattr(has, name) != getattr(wanted, name)
        ]
        if differ:
            raise PaddingConfigError(
                f"the engine of {role} was made with {', '.join(differ)}: that is not what the "
                "job's config says. A worker class or a patch that changes an engine's config "
                "must do so where the driver sees it."
            )

    return for_training_workers(check)


def probe_models(worker_groups: list[PaddedWorkerGroup], job: VerlJob, batch: KVBatchMeta) -> bool:
    """Has each model show, on the position ids of a batch, that it keeps packed rows apart.

    Returns: whether rows that part may share what is before.
    """
    (row,) = read_rows(batch.keys[:1], batch.partition_id, ["position_ids"])
    probe = probe_for_leaks(
        row["position_ids"].shape[:-1],
        shares=job.shares,
        fixes={
            role: f"{engine.model_section}.use_remove_padding=False"
            for role, engine in job.engines.items()
        },
        multiples={role: engine.micro_batch_multiple for role, engine in job.engines.items()},
    )
    answers = [worker_group.execute_with_func_generator(probe) for worker_group in worker_groups]
    for answer in answers:
        block_savings(job, answer)
    return all(answer.non_tensor_batch[BRANCHES].all() for answer in answers)
