"""The packages that a job's rollout, engines, attention and loggers need. None is imported."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, ok, wrong
from verl_padding.job.roles_of_job import has_critic, has_separate_reference

ROLLOUTS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""verl's rollout -> its module."""
ENGINES = {"megatron": ("megatron", "mbridge"), "veomni": ("veomni",), "torchtitan": ("torchtitan",)}
"""Strategy of a role -> modules of its engine."""
LOGGERS = {
    "wandb": "wandb",
    "tracking": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "clearml": "clearml",
    "trackio": "trackio",
}
"""Name in ``trainer.logger`` -> its module. verl imports them after its workers have started."""
INSTALLED_AS = {"megatron": "megatron-core", "tensorrt_llm": "tensorrt-llm", "flash_attn": "flash-attn"}
"""Module -> name on the package index, where they differ."""
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


def packages_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether each is installed."""
    yield _rollout(str(config.actor_rollout_ref.rollout.name))
    roles = ["actor_rollout_ref.actor"]
    roles += ["actor_rollout_ref.ref"] if has_separate_reference(config) else []
    roles += ["critic"] if has_critic(config) else []
    strategies = {f"{role}.strategy": str(OmegaConf.select(config, f"{role}.strategy")) for role in roles}
    for setting, strategy in strategies.items():
        for module in ENGINES.get(strategy, ()):
            yield _needed(setting, strategy, module)
    attention = OmegaConf.select(config, ATTENTION) or "flash_attention_2"
    is_fsdp = {"fsdp", "fsdp2"} & {*strategies.values()}
    if config.trainer.device == "cuda" and is_fsdp and attention == "flash_attention_2" and not _is_there("kernels"):
        yield _needed(ATTENTION, attention, "flash_attn")
    loggers = config.trainer.logger
    for name in [loggers] if isinstance(loggers, str) else loggers:
        if name in LOGGERS:
            yield _needed("trainer.logger", name, LOGGERS[name])


def _rollout(name: str) -> Finding:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    setting = "actor_rollout_ref.rollout.name"
    if name in ROLLOUTS:
        return _needed(setting, name, ROLLOUTS[name])
    try:
        RolloutReplicaRegistry.get(name)
    except ValueError as refusal:
        return wrong(setting, f"{name}: {refusal}. Choose one of these; +local=cpu brings `transformers`.")
    return ok(setting, name)


def _needed(setting: str, value: str, module: str) -> Finding:
    if _is_there(module):
        return ok(setting, value)
    extra = "'verl_padding[vllm]'" if module == "vllm" else INSTALLED_AS.get(module, module)
    return wrong(setting, f"{value}: {module} is not installed here. pip install {extra}")


def _is_there(module: str) -> bool:
    return find_spec(module) is not None
