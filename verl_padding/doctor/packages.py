"""The packages that a job's rollout, engines, attention and loggers need. None is imported."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, ok, wrong
from verl_padding.job.roles_of_job import has_critic, has_separate_reference

MODULES = {
    **{name: (name,) for name in ("vllm", "sglang", "veomni", "torchtitan")},
    **{name: (name,) for name in ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")},
    "trtllm": ("tensorrt_llm",),
    "megatron": ("megatron", "mbridge"),
    "flash_attention_2": ("flash_attn",),
    "tracking": ("wandb",),
}
"""Value of a setting -> modules that verl imports for it, many of them after its workers have started."""
INSTALLED_AS = {
    "vllm": "'verl_padding[vllm]'",
    "megatron": "megatron-core",
    "tensorrt_llm": "tensorrt-llm",
    "flash_attn": "flash-attn",
}
"""Module -> what pip installs it by, where that is another name."""
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"


def packages_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether each is installed."""
    roles = ["actor_rollout_ref.actor"]
    roles += ["actor_rollout_ref.ref"] if has_separate_reference(config) else []
    roles += ["critic"] if has_critic(config) else []
    values = {name: OmegaConf.select(config, name) for name in ("actor_rollout_ref.rollout.name", "trainer.logger")}
    values |= {f"{role}.strategy": OmegaConf.select(config, f"{role}.strategy") for role in roles}
    if config.trainer.device == "cuda" and {"fsdp", "fsdp2"} & {*map(str, values.values())}:
        attention = OmegaConf.select(config, ATTENTION) or "flash_attention_2"
        values[ATTENTION] = None if _is_there("kernels") else attention  # which fetches flash attention
    for setting, chosen in values.items():
        for value in [chosen] if isinstance(chosen, str) else chosen or ():
            missing = [module for module in MODULES.get(value, ()) if not _is_there(module)]
            if missing:
                name = INSTALLED_AS.get(missing[0], missing[0])
                yield wrong(setting, f"{value}: {missing[0]} is not installed here. pip install {name}")
            else:
                yield ok(setting, value)


def _is_there(module: str) -> bool:
    return find_spec(module) is not None
