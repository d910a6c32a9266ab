"""verl's real actor workers on real FSDP2 ranks, without a trainer around them."""

from pathlib import Path
from uuid import uuid4

import ray
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.engine_workers import ActorRolloutRefWorker

from tests.verl_config import compose_job


def start_actor(model: Path, n_ranks: int, *overrides: str) -> RayWorkerGroup:
    """An actor of ``n_ranks`` FSDP2 ranks, from the model's weights."""
    config = compose_job(
        "+local=cpu",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.total_training_steps=100",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        *overrides,
    )
    workers = RayWorkerGroup(
        resource_pool=RayResourcePool([n_ranks], use_gpu=True, name_prefix=uuid4().hex),
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor"
        ),
        device_name="cpu",
    )
    workers.init_model()
    return workers


def start_over(workers: RayWorkerGroup, loss_agg_mode: str) -> None:
    """Gives the workers the model's weights and a new optimizer again, and their losses another mode."""

    def reset(worker) -> DataProto:
        worker.actor.reset()
        loss = worker.actor.loss_fn
        ppo_loss = getattr(loss, "inner", loss)
        object.__setattr__(ppo_loss.keywords["config"], "loss_agg_mode", loss_agg_mode)
        return DataProto()

    workers.execute_with_func_generator(reset)


def stop(workers: RayWorkerGroup) -> None:
    """Ends the workers and gives their tickets back."""
    for worker in workers.workers:
        ray.kill(worker)
    for group in workers.resource_pool.pgs:
        ray.util.remove_placement_group(group)


def weights_of(workers: RayWorkerGroup) -> torch.Tensor:
    """All parameters, (N,) float32, gathered from the ranks."""
    return workers.execute_with_func_generator(_gather_weights).batch["weights"][0]


def _gather_weights(worker) -> DataProto:
    parameters, _ = worker.actor.engine.get_per_tensor_param()
    flat = torch.cat([tensor.detach().float().reshape(-1).cpu() for _, tensor in parameters])
    return DataProto(batch=TensorDict({"weights": flat.unsqueeze(0)}, batch_size=1))
