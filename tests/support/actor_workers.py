"""verl's real actor workers on real FSDP2 ranks, without a trainer around them."""

from uuid import uuid4

import ray
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.vendor import VARIABLE, VENDOR


def start_actor(model, n_ranks, *overrides, padded=True):
    """An actor of ``n_ranks`` ranks, of FSDP2 unless an override says otherwise, from the model's
    weights; ``padded``: with the engine of a padded job."""
    said = (
        *on_a_cpu(overrides),
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.total_training_steps=100",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        *overrides,
    )
    config = compose_job(JobArguments(overrides=said))
    worker_arguments = {
        "config": config.actor_rollout_ref,
        "role": "actor",
        "distillation_config": config.distillation,
    }
    workers = start(n_ranks, ActorRolloutRefWorker, padded, **worker_arguments)
    workers.init_model()
    return workers


def on_a_cpu(overrides):
    """The choice of ``local``, where overrides make none."""
    return [] if any(override.startswith("+local=") for override in overrides) else ["+local=cpu"]


def start(n_ranks, worker, padded, **worker_arguments):
    """A group of workers of a class, with what its constructor takes."""
    return RayWorkerGroup(
        resource_pool=RayResourcePool([n_ranks], use_gpu=True, name_prefix=uuid4().hex),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(worker), **worker_arguments),
        device_name="cpu",
        worker_env={VARIABLE: VENDOR} if padded else {},
    )


def stop(workers):
    """Ends the workers and gives their tickets back."""
    for worker in workers.workers:
        ray.kill(worker)
    for group in workers.resource_pool.pgs:
        ray.util.remove_placement_group(group)
