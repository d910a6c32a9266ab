"""verl's engines as padded jobs have them: a mixin before the engine that verl would choose. And
what engines have done in a call, for the driver.

verl's registry looks up an engine by device and vendor, and takes the vendor from
``VERL_ENGINE_VENDOR`` where that is set. The config group sets it to :data:`VENDOR` for the workers
of a padded job, so that those of any other job have verl's own classes. A call that was not planned
runs as verl's engine runs it.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional

from verl_padding.errors import PaddingDataError
from verl_padding.job.vendor import VARIABLE, VENDOR
from verl_padding.pads.planned_call import BATCH_ROW, MINI_BATCH, planned_call, read_column
from verl_padding.prefix_sharing.engine import MEGATRON, SharingEngine, VerlEngine
from verl_padding.prefix_sharing.row_inputs import INPUT_IDS
from verl_padding.verl_fixes.position_ids import fix_all_position_ids
from verl_padding.verl_fixes.text_without_image import give_features_alone
from verl_padding.worker.log_probs import use_chunked_cross_entropy
from verl_padding.worker.losses import RealRowsLoss
from verl_padding.worker.megatron_engine import MegatronSharingEngine
from verl_padding.worker.packed_attention import patch_attention_of
from verl_padding.worker.plan_packer import micro_batches_of_plan
from verl_padding.worker.training_workers import answer, training_workers

WORK = "work"
"""Name of what workers answer: of each rank a ``Counter`` of :data:`TOKENS`, :data:`STEPS` and
:data:`SCHEDULER_STEPS`."""
TOKENS, STEPS, SCHEDULER_STEPS = "tokens", "optimizer_steps", "scheduler_steps"


class PaddedEngine(VerlEngine):
    """Mixin before one of verl's engines: its optimizer steps and micro-batches are those of the
    plan, and its losses see real rows alone."""

    stock: ClassVar[Any]
    """The engine that it is put before."""
    engine_config: Any
    module: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.done: Counter[str] = Counter()
        """What the engine has done since a call began."""

    def initialize(self) -> None:
        """Builds the model, also where a worker starts over."""
        super().initialize()
        # One a loss of the worker: it knows what that has reported before.
        self._real_rows_loss = functools.cache(RealRowsLoss)
        fix_all_position_ids()
        give_features_alone(self.module)
        use_chunked_cross_entropy(torch_functional)
        patch_attention_of(self)

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """An optimizer step; the scheduler of the learning rate takes its step after the last one
        of a call.

        verl's workers take mini-batches from a DataLoader, whose sampler the trainer gives: they
        count them as if they had one row, and so never come to the last.
        """
        if (call := planned_call(data)) is not None:
            rows = tuple(read_column(data, BATCH_ROW).tolist())
            if not call.mini_batches or rows not in call.mini_batches[0].local_batches:
                raise PaddingDataError(  # verl would train on wrong rows
                    f"an optimizer step has {len(rows)} rows that are not the plan's next "
                    "mini-batch. Train with verl 0.9.1, or without +padding."
                )
            tu.assign_non_tensor_data(data, MINI_BATCH, call.mini_batches.popleft())
            tu.assign_non_tensor(data, update_lr_scheduler=not call.mini_batches)
        return super().train_batch(data, loss_function)

    def optimizer_step(self) -> Any:
        self.done[STEPS] += 1
        return super().optimizer_step()

    def lr_scheduler_step(self) -> Any:
        self.done[SCHEDULER_STEPS] += 1
        return super().lr_scheduler_step()

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        if loss_function is not None and MINI_BATCH in data:
            loss_function = self._real_rows_loss(loss_function)
        run = super().forward_backward_batch
        with micro_batches_of_plan(self.stock):
            return run(data, loss_function, forward_only)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        ids = micro_batch[INPUT_IDS]  # dense in a user's own call, as verl's engine may take it
        self.done[TOKENS] += len(ids.values()) if ids.is_nested else ids.numel()
        return super().prepare_model_inputs(micro_batch)


def padded(engine: type) -> type:
    """An engine of verl's, or of a user's that is made as verl's are, behind the mixins."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    mixins: tuple[type, ...] = (PaddedEngine,)
    if issubclass(engine, FSDPEngine):
        mixins = (SharingEngine, PaddedEngine)
    elif any(cls.__module__ == MEGATRON for cls in engine.__mro__):
        mixins = (MegatronSharingEngine, PaddedEngine)
    return type(f"Padded{engine.__name__}", (*mixins, engine), {"stock": engine})


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


def register_padded_engines() -> None:
    """Registers a padded counterpart of each engine of verl's registry that this process would get
    and that has none yet.

    Whoever registers an engine of his own calls this afterwards, in the same module.
    """
    from verl.utils.device import get_device_name
    from verl.workers.engine import EngineRegistry

    device = os.environ.get("VERL_ENGINE_DEVICE") or get_device_name()
    chosen = os.environ.pop(VARIABLE, None)
    try:
        for model_type, backends in EngineRegistry._engines.items():
            for backend, engines in backends.items():
                if (device, VENDOR) in engines:
                    continue
                try:
                    engine = EngineRegistry.get_engine_cls(model_type, backend)
                except ValueError:
                    continue  # it has none for this device, and says so when it is asked
                EngineRegistry.register(model_type, backend, device, VENDOR)(padded(engine))
    finally:
        if chosen is not None:
            os.environ[VARIABLE] = chosen
