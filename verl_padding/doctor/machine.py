"""What a job needs of this machine: packages, devices, files and code. They are looked for, and neither run nor read.

That there are fewer GPUs than the job takes, verl says itself before it starts a worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import glob
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_checked, ok, warning, wrong
from verl_padding.job.role_engine import has_critic, has_separate_reference
from verl_padding.rehearsal.own_files import FILES, LISTS

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

PLATFORM, CPU = "VERL_PLATFORM", "cpu"
"""Environment variable that names verl's platform, and its value without accelerators."""
CPUS_A_RANK = 3
"""``max_colocate_count`` of verl's ``ResourcePoolManager``."""

MODEL = "actor_rollout_ref.model.path"
DATA = ("data.train_files", "data.val_files")


def packages_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether the packages of the job's rollout, engines, attention and loggers are installed."""
    roles = ["actor_rollout_ref.actor"]
    roles += ["actor_rollout_ref.ref"] if has_separate_reference(config) else []
    roles += ["critic"] if has_critic(config) else []
    settings = ["actor_rollout_ref.rollout.name", "trainer.logger", *(f"{role}.strategy" for role in roles)]
    values = {setting: OmegaConf.select(config, setting) for setting in settings}
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


def choose_platform() -> str:
    """The platform that the environment names, or "". verl's own modules are then imported as for that one.

    A torch without accelerators can import them on the platform "cpu" only, so there it is set.
    """
    chosen = os.environ.get(PLATFORM, "").strip().lower()
    try:
        import torch
    except ImportError:  # reported as a version that is missing
        return chosen
    if not (torch.version.cuda or torch.version.hip or _is_there("torch_npu")):
        os.environ[PLATFORM] = CPU
    return chosen


def devices_of_job(config: DictConfig, platform: str) -> Iterator[Finding]:
    """Whether verl's platform, "" for none, fits the job, and Ray may give out as many CPUs as verl asks for."""
    device, named = config.trainer.device, platform or "not set"
    if (device == CPU) == (platform == CPU):
        yield ok(PLATFORM, named)
    elif device == CPU:
        yield wrong(PLATFORM, f"{named}, but trainer.device=cpu: verl looks for accelerators. export {PLATFORM}={CPU}")
    else:
        message = f"cpu, but trainer.device={device}: the job trains on the CPU. +local=cpu has settings for that."
        yield warning(PLATFORM, message)
    ranks, given = config.trainer.n_gpus_per_node, OmegaConf.select(config, "ray_kwargs.ray_init.num_cpus")
    needed = CPUS_A_RANK * ranks + 1  # and one for the trainer's own process
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        yield not_checked("trainer.n_gpus_per_node", f"the devices are those of the Ray cluster {address}")
    elif config.trainer.nnodes == 1 and given is not None and given < needed:
        yield wrong(
            "ray_kwargs.ray_init.num_cpus",
            f"{given}: verl asks Ray for {needed}, and the job would wait for ever. They are tickets, not cores: raise "
            f"it, or lower trainer.n_gpus_per_node={ranks}.",
        )


def files_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether models, data and code of the user's own are there; ``verl-padding rehearse`` runs them."""
    models = [MODEL]
    models += ["critic.model.path"] if has_critic(config) else []
    models += ["reward.reward_model.model_path"] if config.reward.reward_model.enable else []
    for setting in (*models, *DATA, *FILES, *LISTS):
        is_code = setting not in (*models, *DATA)
        value = OmegaConf.select(config, setting)
        values = value if isinstance(value, ListConfig) else [value]
        for name in [str(each) for each in values if each or not is_code]:
            if is_code:
                there = _is_code_there(name)
            else:
                there = Path(name).is_dir() if setting in models else bool(glob(os.path.expanduser(name)))
            if there:
                yield ok(setting, name)
            elif not is_code and ("://" in name or (setting in models and not name.startswith((".", "/")))):
                yield not_checked(setting, f"{name}: not here; verl fetches it when the job starts")
            else:
                yield wrong(setting, f"{name}: there is no such file, folder or module. Correct it.")
    yield from _checkpoint(config)


def _is_code_there(name: str) -> bool:
    path = Path(name.removeprefix("file://"))
    if path.suffix in (".py", ".yaml", ".yml", ".json"):
        return path.is_file()
    return find_spec(name.removeprefix("pkg://").replace("/", ".").split(".")[0]) is not None


def _checkpoint(config: DictConfig) -> Iterator[Finding]:
    """What verl passes over in silence: a folder that it resumes from, and whose latest checkpoint is not there."""
    folder = Path(str(config.trainer.default_local_dir))
    latest = folder / "latest_checkpointed_iteration.txt"
    if config.trainer.resume_mode == "auto" and latest.is_file():
        step = folder / f"global_step_{latest.read_text().strip()}"
        if not step.is_dir():
            yield wrong(
                "trainer.resume_mode",
                f"auto: {latest} names {step.name}, which is not there: verl would begin anew. Correct the file, or "
                "set trainer.resume_mode=disable.",
            )
