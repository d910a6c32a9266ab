"""Values that verl passes on to torch, Ray and Jinja, which refuse them in a worker, minutes after the start."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from difflib import get_close_matches
from importlib import import_module, resources
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.data_files import validates
from verl_padding.doctor.finding import Finding, warning, wrong
from verl_padding.doctor.settings import is_read

TRAINED = {"actor_rollout_ref.actor": "actor_rollout_ref.actor.optim", "critic": "critic.optim"}
"""Section -> that of its optimizer."""
LEAST = {
    "data.dataloader_num_workers": 0,
    "data.max_response_length": 1,
    "data.val_batch_size": 0,
    "actor_rollout_ref.actor.optim.lr": 0,
    "actor_rollout_ref.actor.optim.weight_decay": 0,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.temperature": 0,
    "actor_rollout_ref.rollout.val_kwargs.n": 1,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.v1.separate_async.parameter_sync_step": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
}
"""Setting -> the smallest number that it may be."""
STEPS = ("trainer.total_epochs", "trainer.total_training_steps")
ROLLOUT = "actor_rollout_ref.rollout"
MEMORY, FORMAT = f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.dtype"
FORMATS = {
    "vllm": ("auto", "half", "float16", "bfloat16", "float", "float32"),
    "sglang": ("auto", "half", "float16", "bfloat16", "float", "float32"),
}
"""Rollout on GPUs -> formats of numbers that it knows."""
VALIDATION = "actor_rollout_ref.rollout.val_kwargs."
SHARES = ("actor_rollout_ref.rollout.top_p", "actor_rollout_ref.rollout.val_kwargs.top_p")
"""Settings that are above 0 and at most 1, for every rollout."""
RAY, ENV_VARS = "ray_kwargs.ray_init", "runtime_env.env_vars"
PROFILED = "global_profiler.steps"
TEMPLATE = "actor_rollout_ref.model.custom_chat_template"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
FLASH = ("flash_attention_2", "flash_attention_3")
FUSED = "actor_rollout_ref.model.use_fused_kernels"
FUSED_BY = "actor_rollout_ref.model.fused_kernel_options.impl_backend"


def values_passed_on(config: DictConfig) -> Iterator[Finding]:
    """Those that cannot be meant; nothing where all can."""
    for section, optim in TRAINED.items():
        if OmegaConf.select(config, f"{section}.strategy") in ("fsdp", "fsdp2"):
            yield from _optimizer(config, optim)
    unused = () if validates(config) else (VALIDATION,)
    for setting, least in LEAST.items():
        if setting.startswith(unused) or not is_read(config, setting):
            continue
        number = OmegaConf.select(config, setting)
        if isinstance(number, int | float) and number < least:
            yield wrong(setting, f"{number}: too few. Set it to {least} or more.")
    for setting in STEPS:
        number = OmegaConf.select(config, setting)
        if isinstance(number, int) and number < 1 and not config.trainer.get("val_only"):
            yield wrong(setting, f"{number}: the job would end before its first step. Set it to 1 or more.")
    for setting in SHARES:
        number = OmegaConf.select(config, setting)
        if isinstance(number, int | float) and not 0 < number <= 1 and not setting.startswith(unused):
            yield wrong(setting, f"{number}: must be above 0 and at most 1, which keeps all tokens.")
    added = OmegaConf.select(config, f"{RAY}.{ENV_VARS}")
    if added is not None and not isinstance(added, DictConfig):
        yield wrong(f"{RAY}.{ENV_VARS}", f"{added}: Ray takes a mapping. Write {{NAME: value}}, or leave it out.")
        added = None
    for name, value in (added or {}).items():
        if not isinstance(value, str):
            yield wrong(f"{RAY}.{ENV_VARS}.{name}", f"{value}: Ray takes texts only. Put it in quotes: \"'{value}'\".")
    yield from _arguments_of_ray(config)
    yield from _storage(config)
    steps = OmegaConf.select(config, PROFILED)
    if isinstance(steps, int):
        yield wrong(PROFILED, f"{steps}: verl looks for each step in a list. Write [{steps}], or leave it out.")
    folder = OmegaConf.select(config, f"{RAY}.runtime_env.working_dir")
    if isinstance(folder, str) and "://" not in folder and not Path(folder).expanduser().exists():
        yield wrong(f"{RAY}.runtime_env.working_dir", f"{folder}: there is no such folder, and Ray copies it. Make it.")
    yield from _template(config)
    attention = OmegaConf.select(config, ATTENTION)
    if config.trainer.device == "cpu" and attention in FLASH:
        yield wrong(ATTENTION, f"{attention}: it has no kernels for a CPU. Set it to sdpa.")
    fused_by = OmegaConf.select(config, FUSED_BY)
    if config.trainer.device == "cpu" and OmegaConf.select(config, FUSED) and fused_by == "triton":
        yield wrong(FUSED_BY, f"{fused_by}: its kernels are for GPUs alone. Set it to torch.")


def _storage(config: DictConfig) -> Iterator[Finding]:
    """Whether TransferQueue has a section for the storage that it is to take, of its own or of the job's."""
    of_its_own = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
    backend = OmegaConf.merge(of_its_own.backend, OmegaConf.select(config, "transfer_queue.backend") or {})
    assert isinstance(backend, DictConfig)
    name = backend.get("storage_backend")
    choices = [str(each) for each, section in backend.items() if isinstance(section, DictConfig)]
    if name is not None and name not in choices:
        setting = "transfer_queue.backend.storage_backend"
        yield wrong(setting, f"{name}: TransferQueue knows no such storage. Choices: {', '.join(choices)}.")


def _arguments_of_ray(config: DictConfig) -> Iterator[Finding]:
    """What Ray would say of names that it does not know; those of a server elsewhere are not known here."""
    import ray

    init = inspect.unwrap(ray.init)
    known, text = inspect.signature(init).parameters, inspect.getsource(init)
    section = OmegaConf.select(config, RAY) or {}
    if str(section.get("address")).startswith("ray://"):
        return
    for name in map(str, section):
        if name not in known and f'"{name}"' not in text:
            near = get_close_matches(name, known, n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            yield wrong(f"{RAY}.{name}", f"{section[name]}: ray.init() takes no such argument.{meant}")


def values_for_rollout(config: DictConfig) -> Iterator[Finding]:
    """Those that a rollout on GPUs refuses; they are told beside its package, since it may be another that is meant."""
    formats = FORMATS.get(config.actor_rollout_ref.rollout.name)
    if formats is None:
        return
    share, number_format = OmegaConf.select(config, MEMORY), OmegaConf.select(config, FORMAT)
    if isinstance(share, int | float) and not 0 < share <= 1:
        yield wrong(MEMORY, f"{share}: a share of a GPU's memory. Set it above 0, and to 1 at most.")
    if isinstance(number_format, str) and number_format not in formats:
        yield wrong(FORMAT, f"{number_format}: no format of numbers of the rollout. Choose {', '.join(formats)}.")


def _optimizer(config: DictConfig, section: str) -> Iterator[Finding]:
    module, name = (OmegaConf.select(config, f"{section}.{key}") for key in ("optimizer_impl", "optimizer"))
    if isinstance(module, str) and isinstance(name, str):
        try:
            has_it = hasattr(import_module(module), name)
        except ImportError:
            yield wrong(f"{section}.optimizer_impl", f"{module}: there is no such module. Install or correct it.")
        else:
            if not has_it:
                yield wrong(f"{section}.optimizer", f"{name}: {module} has no such optimizer. Correct the name.")
    betas = OmegaConf.select(config, f"{section}.betas")
    if betas is not None and len(betas) != 2:
        yield wrong(f"{section}.betas", f"{list(betas)}: must be two numbers, such as [0.9,0.999].")


def _template(config: DictConfig) -> Iterator[Finding]:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = OmegaConf.select(config, TEMPLATE)
    if isinstance(template, str):
        try:
            _compile_jinja_template(template)  # with tags of its own, such as {% generation %}
        except TemplateSyntaxError as error:
            yield wrong(TEMPLATE, f"{template}: no template of Jinja ({error}). Correct it.")
        else:
            if "{" not in template:
                yield warning(
                    TEMPLATE,
                    f"{template}: a text without any place for messages. Give the template itself; verl reads no file.",
                )
