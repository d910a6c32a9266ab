"""Whether the model has the modules that LoRA is to adapt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, ok, warning, wrong

SECTION = "actor_rollout_ref.model"
SETTING = f"{SECTION}.target_modules"
WHOLE_WEIGHTS = ("transformers",)
"""Rollouts that take no adapters beside the weights."""
SHOWN = 12
"""Names of a model's own modules that a message shows at most."""


MERGE = f"{SECTION}.lora.merge"


def lora_of_job(config: DictConfig) -> Iterator[Finding]:
    """Whether the rollout takes adapters."""
    model = config.actor_rollout_ref.model
    adapts = model.lora_adapter_path or (isinstance(model.lora_rank, int) and model.lora_rank > 0)
    merges = bool(OmegaConf.select(config, MERGE))
    if adapts and not merges and config.actor_rollout_ref.rollout.name in WHOLE_WEIGHTS:
        name = config.actor_rollout_ref.rollout.name
        yield wrong(MERGE, f"{merges}: the rollout {name!r} takes whole weights, no adapters. Set {MERGE}=true.")


def modules_of_lora(config: DictConfig, made: Any) -> Iterator[Finding]:
    """Whether the model has what ``target_modules`` names.

    Megatron's engine reads ``model.lora`` in its place; ``all-linear`` finds its modules itself.

    Args:
        made: the model, a module of torch.
    """
    model = OmegaConf.select(config, SECTION)
    named, rank = model.target_modules, model.lora_rank
    if not isinstance(rank, int) or rank <= 0 or model.get("lora_adapter_path") or named in (None, "all-linear"):
        return
    yield from _named(named if isinstance(named, str) else list(named), made)


def _named(named: str | list[str], made: Any) -> Iterator[Finding]:
    """PEFT takes a text for a regular expression of whole names, and a list for ends of names."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from torch.nn import Linear

    modules = [name for name, _ in made.named_modules() if name]

    def is_found(target: str | list[str]) -> bool:
        adapted = LoraConfig(target_modules=target)
        return any(check_target_module_exists(adapted, module) for module in modules)

    ends = sorted({name.rpartition(".")[2] for name, each in made.named_modules() if isinstance(each, Linear)})
    shown = f"{', '.join(ends[:SHOWN])}{', ...' if len(ends) > SHOWN else ''}"
    has = f"Its linear layers are {shown}. Name some of them, or set it to all-linear."
    missing = [] if isinstance(named, str) else [name for name in named if not is_found([name])]
    if not is_found(named):
        yield wrong(SETTING, f"{named}: the model has no module of this name. {has}")
    elif missing:
        yield warning(SETTING, f"{', '.join(missing)}: the model has no such module, the others are adapted. {has}")
    else:
        yield ok(SETTING, f"{named}")
