"""verl's real actor and critic workers on real FSDP2 ranks, without a trainer around them."""

from functools import partial

import torch
from tensordict import TensorDict
from transformers import AutoModelForTokenClassification, AutoTokenizer
from verl.protocol import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import value_loss

from tests.support.actor_workers import on_a_cpu, start, start_actor, stop
from tests.support.verl_config import compose_job

__all__ = ["start_actor", "stop"]


def start_critic(model, n_ranks, *overrides, padded=True):
    """A critic of ``n_ranks`` ranks, from the weights of a model with a value head, as verl's
    trainer does it."""
    config = compose_job(
        *on_a_cpu(overrides),
        "algorithm.adv_estimator=gae",
        f"actor_rollout_ref.model.path={model}",
        "critic.optim.lr=1e-3",
        "critic.optim.total_training_steps=100",
        *overrides,
    )
    critic = omega_conf_to_dataclass(config.critic)
    critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    critic.engine.max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    training = TrainingWorkerConfig(
        model_type="value_model",
        model_config=critic.model,
        engine_config=critic.engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
    )
    workers = start(n_ranks, TrainingWorker, padded, config=training)
    workers.reset()
    workers.set_loss_fn(partial(value_loss, config=critic))
    return workers


def make_value_model(language_model, folder):
    """A model with a value head, of a language model's weights: every worker then starts from the
    same head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForTokenClassification.from_pretrained(
            language_model, num_labels=1
        ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(language_model).save_pretrained(folder)
    return folder


def start_over(
    groups,
    loss_agg_mode,
    micro_batch_rows=None,
    policy_loss="vanilla",
    terms=True,
):
    """Gives workers the model's weights and a new optimizer again, and verl's loss with other
    modes.

    Args:
        micro_batch_rows: rows of a micro-batch; None for as many as the token budget allows.
        terms: whether an actor's loss has its KL and entropy terms.
    """

    def reset(worker):
        training_worker = getattr(worker, "actor", worker)
        training_worker.reset()
        if training_worker.engine_config.strategy == "veomni":
            # verl's engine reads no override_optimizer_config.
            for group in training_worker.engine.optimizer.param_groups:
                group["eps"] = 1e-5
        config = training_worker.loss_fn.keywords["config"]
        object.__setattr__(config, "loss_agg_mode", loss_agg_mode)
        if hasattr(config, "policy_loss"):
            object.__setattr__(config.policy_loss, "loss_mode", policy_loss)
            object.__setattr__(config, "use_kl_loss", terms)
            object.__setattr__(config, "entropy_coeff", 0.01 if terms else 0.0)
        object.__setattr__(
            training_worker.engine_config, "use_dynamic_bsz", micro_batch_rows is None
        )
        object.__setattr__(
            training_worker.engine_config, "micro_batch_size_per_gpu", micro_batch_rows
        )
        return DataProto()

    for workers in groups:
        workers.execute_with_func_generator(reset)


def weights_of(workers):
    """All parameters, (N,) float32, gathered from the ranks; each rank must have the same."""
    rank_weights = workers.execute_with_func_generator(_gather_weights).batch["weights"]
    assert all(torch.equal(weights, rank_weights[0]) for weights in rank_weights), (
        "copies of weights differ between ranks"
    )
    return rank_weights[0]


def moments_of(workers):
    """Both moments of AdamW of all parameters of an FSDP2 engine, (2N,) float32."""

    def gather(worker):
        states = getattr(worker, "actor", worker).engine.optimizer.state.values()
        flat = [
            state[name].full_tensor().reshape(-1)
            for name in ("exp_avg", "exp_avg_sq")
            for state in states
        ]
        return DataProto(batch=TensorDict({"moments": torch.cat(flat).unsqueeze(0)}, batch_size=1))

    return workers.execute_with_func_generator(gather).batch["moments"][0]


def _gather_weights(worker):
    engine = getattr(worker, "actor", worker).engine
    if engine.engine_config.strategy != "megatron":
        named = {name: weight.full_tensor() for name, weight in engine.module.named_parameters()}
        named = dict(_with_a_weight_for_each_expert(named))
    else:
        named = {name: weight.clone() for name, weight in engine.get_per_tensor_param()[0]}
    flat = torch.cat([named[name].detach().float().reshape(-1) for name in sorted(named)])
    return DataProto(batch=TensorDict({"weights": flat.unsqueeze(0)}, batch_size=1))


def _with_a_weight_for_each_expert(
    named,
):
    """As they are named in a folder of a model, and by bridges; transformers keeps those of a layer
    in one tensor."""
    for name, weight in named.items():
        layer, experts, kind = name.partition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if not experts or not parts:
            yield name, weight
            continue
        for expert, expert_weight in enumerate(weight):
            for part, part_weight in zip(parts, expert_weight.chunk(len(parts)), strict=True):
                yield f"{layer}{experts}{expert}.{part}.weight", part_weight
