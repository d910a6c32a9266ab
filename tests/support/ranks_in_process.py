"""A worker group of verl's whose ranks are objects of this process.

Its dispatch is verl's, and so is what a worker does with its rows before an engine gets them.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import ray
import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ray.base import RayWorkerGroup, func_generator
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from verl_padding.worker.padded_engine import padded

MESH = "actor"
ANSWER = "answer"  # field that a pass answers with: the number of each row
SHAPES = {
    "64": (64, lambda rank: rank, lambda rank: True),
    "16 x 4 neighbours": (16, lambda rank: rank // 4, lambda rank: rank % 4 == 0),
    "16 x 4 stages": (16, lambda rank: rank % 16, lambda rank: rank >= 48),
}
"""Of 64 ranks: data-parallel size, data-parallel rank of each, and whether it answers. Ranks that
share rows are neighbours with Ulysses and tensor parallelism, and far apart in a pipeline, where
the last stage answers."""


class Engine(SimpleNamespace):
    """It says where it stands, and has nothing to train."""

    engine_config, module = SimpleNamespace(), None

    def train_batch(self, data, loss_function):
        self.optimizer_step()

    def optimizer_step(self): ...

    def lr_scheduler_step(self): ...


class Rank(TrainingWorker):
    """verl's worker with a padded engine that computes nothing.

    Args:
        numbers: the number of each row of worker data; None for a row without.
    """

    def __init__(
        self,
        dp_rank,
        dp_size,
        answers,
        numbers,
    ):
        # verl's own starts a process group, and an engine with a model.
        self._Worker__dispatch_dp_rank, self._Worker__collect_dp_rank = (
            {MESH: dp_rank},
            {MESH: answers},
        )
        self.numbers = numbers
        self.engine = padded(Engine)(
            get_data_parallel_size=lambda: dp_size,
            get_data_parallel_rank=lambda: dp_rank,
            train_mode=lambda **_: nullcontext(),
            is_mp_src_rank_with_outputs=lambda: answers,
        )
        self.profiler = SimpleNamespace(step=lambda: None)
        self.passes = []
        """Rows of each pass, in their order."""
        self.mini_batches = []
        """Rows of each mini-batch that was trained on."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def compute_log_prob(self, data):
        self.passes.append(self.numbers(data))
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        answer = [-1 if number is None else number for number in self.passes[-1]]
        return TensorDict({ANSWER: torch.tensor(answer)}, batch_size=len(data))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH))
    def update_actor(self, data):
        return self.train_mini_batch(data=data)

    def train_batch(self, data):
        # As verl's own does it.
        self.engine.train_batch(data, loss_function=None)
        if tu.get(data, "update_lr_scheduler"):
            self.engine.lr_scheduler_step()
        self.mini_batches.append(self.numbers(data))
        return tu.get_tensordict(
            tensor_dict={}, non_tensor_dict={"metrics": {"rows": [[len(data)]]}}
        )


class RanksInProcess(RayWorkerGroup):
    """A worker group of these ranks, all of one class."""

    def __init__(self, ranks):
        WorkerGroup.__init__(self, resource_pool=None)
        self._workers = list(ranks)
        self._world_size, self.fused_worker_used = len(self._workers), False
        self._bind_worker_method(type(ranks[0]), func_generator)

    @classmethod
    def from_shape(cls, shape, numbers):
        """64 ranks of a shape of :data:`SHAPES`."""
        dp_size, dp_rank_of, answers = SHAPES[shape]
        return cls([Rank(dp_rank_of(rank), dp_size, answers(rank), numbers) for rank in range(64)])

    def _execute_remote_single_worker(self, worker, method_name, *args, **kwargs):
        here = [ray.get(value) if isinstance(value, ray.ObjectRef) else value for value in args]
        return ray.put(getattr(worker, method_name)(*here, **kwargs))

    def dp_ranks(self):
        """The data-parallel rank of each rank."""
        return [worker.engine.get_data_parallel_rank() for worker in self._workers]
