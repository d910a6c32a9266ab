"""The packages that a job's rollout, engines, model and loggers need."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_looked_at, ok, wrong
from verl_padding.doctor.named_objects import is_module
from verl_padding.doctor.served_models import settings_of_rollouts
from verl_padding.errors import PaddingConfigError
from verl_padding.job.engines_on_cpu import command_for, refuse_other_versions
from verl_padding.job.modes import MODE_PREFIX, SEPARATE_ASYNC
from verl_padding.job.roles_of_job import has_critic, has_separate_reference

ROLLOUTS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""verl's rollout -> its module."""
ENGINES = {
    "fsdp": (),
    "fsdp2": (),
    "megatron": ("megatron.core",),
    "veomni": ("veomni",),
    "torchtitan": ("torchtitan",),
    "automodel": ("nemo_automodel",),
    "mindspeed": ("mindspeed",),
}
"""Strategy of a role -> modules of its engine."""
NOT_OF_WANDB = {*"/\\#?%:"}
"""Characters that wandb has in no project's name (``wandb.Settings.validate_project``)."""
LOGGERS = {
    "console": None,
    "file": None,
    "wandb": "wandb",
    "tracking": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "vemlp_wandb": "volcengine_ml_platform",
    "tensorboard": "tensorboard",
    "clearml": "clearml",
    "trackio": "trackio",
    "rl_insight": "rl_insight",
}
"""Name in ``trainer.logger`` -> its module. verl imports them after its workers have started."""
TRACE = "actor_rollout_ref.rollout.trace.backend"
TRACES = ("weave", "mlflow", "trackio")
"""What writes traces of sessions, each by the module of its name; verl takes any other name for none."""
INSTALLED_AS = {
    "megatron.core": "megatron-core",
    "megatron.bridge": "megatron-bridge",
    "transformer_engine": "transformer-engine[pytorch]",
    "tensorrt_llm": "tensorrt-llm",
    "nemo_automodel": "nemo-automodel",
    "volcengine_ml_platform": "volcengine-ml-platform",
    "rl_insight": "rl-insight",
    "liger_kernel": "liger-kernel",
    "flash_attn": "flash-attn",
}
"""Module -> name on the package index, where they differ."""


def packages_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether each is installed; none is imported."""
    for setting in settings_of_rollouts(config):
        yield _rollout(setting, str(OmegaConf.select(config, setting)))
    yield from _engines(config)
    yield from _carrier_of_weights(config)
    traced = str(OmegaConf.select(config, TRACE))
    if traced in TRACES:
        yield _needed(TRACE, traced, traced)
    model = config.actor_rollout_ref.model
    if model.get("use_liger"):
        yield _needed("actor_rollout_ref.model.use_liger", "True", "liger_kernel")
    if config.trainer.device == "cuda":
        yield from _attention(config)
    loggers = config.trainer.logger
    for name in [loggers] if isinstance(loggers, str) else loggers:
        if name not in LOGGERS:
            yield wrong("trainer.logger", f"{name}: verl has no logger of this name. Choices: {', '.join(LOGGERS)}.")
        elif module := LOGGERS[name]:
            yield _needed("trainer.logger", name, module)
            if module == "wandb" and is_module(module):
                yield _wandb()
            if module == "wandb" and (refused := sorted({*str(config.trainer.project_name)} & NOT_OF_WANDB)):
                yield wrong(
                    "trainer.project_name",
                    f"{config.trainer.project_name}: wandb refuses a project with {' '.join(refused)} in its name. "
                    "Name another.",
                )


def _carrier_of_weights(config: DictConfig) -> Iterator[Finding]:
    """What takes the weights to the rollout's own devices; verl has those whose packages it can import."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    section = config.actor_rollout_ref.rollout.checkpoint_engine
    if config.trainer.v1.trainer_mode.removeprefix(MODE_PREFIX) != SEPARATE_ASYNC or section.custom_backend_module:
        return
    try:
        CheckpointEngineRegistry.get(section.backend)
    except ValueError as refusal:
        setting = "actor_rollout_ref.rollout.checkpoint_engine.backend"
        own = re.search(rf"\b{section.backend}\w*: ([^,.]+)", str(refusal))
        reason = own[1] if own else refusal
        fix = "Leave it out: +local=cpu has one" if config.trainer.device == "cpu" else "Install its package"
        yield wrong(setting, f"{section.backend}: verl cannot use it here ({reason}). {fix}.")


def _wandb() -> Finding:
    """wandb asks for a key where there is a terminal, and there is none in the trainer's process."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return ok("WANDB_MODE", os.environ["WANDB_MODE"])
    if os.environ.get("WANDB_API_KEY"):
        return ok("WANDB_API_KEY", "set")
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    if file.is_file() and "wandb" in file.read_text(errors="replace"):
        return ok("trainer.logger", f"wandb, with the key of {file}")
    return wrong(
        "WANDB_API_KEY",
        "not set, and there is no key of `wandb login`, but trainer.logger has wandb: set it, or WANDB_MODE=offline, "
        "or trainer.logger=[console,file].",
    )


def _attention(config: DictConfig) -> Iterator[Finding]:
    setting = "actor_rollout_ref.model.override_config.attn_implementation"
    strategies = [OmegaConf.select(config, f"{role}.strategy") for role in roles_of(config)]
    attention = OmegaConf.select(config, setting) or "flash_attention_2"
    if set(strategies) & {"fsdp", "fsdp2"} and attention == "flash_attention_2" and not is_module("kernels"):
        yield _needed(setting, attention, "flash_attn")


def roles_of(config: DictConfig) -> list[str]:
    """Sections of the roles that the job trains or asks."""
    roles = ["actor_rollout_ref.actor"]
    roles += ["actor_rollout_ref.ref"] if has_separate_reference(config) else []
    return roles + (["critic"] if has_critic(config) else [])


def _rollout(setting: str, name: str) -> Finding:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    if name in ROLLOUTS:
        return _needed(setting, name, ROLLOUTS[name])
    try:
        RolloutReplicaRegistry.get(name)
    except ValueError as refusal:
        return wrong(setting, f"{name}: {refusal}. Choose one of these; +local=cpu brings `transformers`.")
    return ok(setting, name)


def _engines(config: DictConfig) -> Iterator[Finding]:
    told: set[str] = set()
    for role in roles_of(config):
        strategy = OmegaConf.select(config, f"{role}.strategy")
        setting = f"{role}.strategy"
        if strategy not in ENGINES:
            yield not_looked_at(setting, f"{strategy}: an engine whose packages are not known here")
            continue
        missing = [module for module in _modules_of(config, role, strategy) if not is_module(module)]
        on_cpu = config.trainer.device == "cpu"
        if missing:
            left = [module for module in missing if module not in told]
            told.update(left)
            # On a CPU, one command brings them all.
            yield from (_missing(setting, strategy, module, on_cpu=on_cpu) for module in left[: 1 if on_cpu else None])
        elif on_cpu and (refusal := _refusal_of_versions(strategy)):
            yield wrong(setting, f"{strategy}: {refusal}")
        else:
            yield ok(setting, strategy)


def _refusal_of_versions(strategy: str) -> str:
    try:
        refuse_other_versions(strategy)
    except (PaddingConfigError, PackageNotFoundError) as refusal:
        return str(refusal)
    return ""


def _modules_of(config: DictConfig, role: str, strategy: str) -> tuple[str, ...]:
    if strategy != "megatron":
        return ENGINES[strategy]
    if config.trainer.device == "cpu":  # no other bridge is taken there, which the plan tells
        return (*ENGINES[strategy], "mbridge")
    vanilla = OmegaConf.select(config, f"{role}.megatron.vanilla_mbridge", default=True)
    # The specs of layers that both bridges ask of Megatron-Core are of this one.
    return (*ENGINES[strategy], "mbridge" if vanilla else "megatron.bridge", "transformer_engine")


def _needed(setting: str, value: str, module: str) -> Finding:
    return ok(setting, value) if is_module(module) else _missing(setting, value, module)


def _missing(setting: str, value: str, module: str, *, on_cpu: bool = False) -> Finding:
    package = INSTALLED_AS.get(module, module)
    if module == "vllm":
        return wrong(setting, f"{value}: {package} is not installed here. In a checkout: pip install '.[vllm]'")
    if module in ("megatron.core", "mbridge") and on_cpu:
        command = "pip install '.[megatron-cpu]'"
        return wrong(setting, f"{value}: {package} is not installed here. In a checkout: {command}")
    if module == "veomni" and on_cpu:
        command = command_for(package)
        return wrong(setting, f"{value}: {package} is not installed here. In an environment of its own: {command}")
    return wrong(setting, f"{value}: {package} is not installed here. pip install {package}")
