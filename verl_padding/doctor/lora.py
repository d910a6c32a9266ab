"""Whether the model has the modules that LoRA is to adapt, or that an adapter was made for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_looked_at, ok, warning, wrong
from verl_padding.doctor.weights import shapes_in

SECTION = "actor_rollout_ref.model"
SETTING = f"{SECTION}.target_modules"
SHOWN = 12
"""Names of a model's own modules that a message shows at most."""
ADAPTER = f"{SECTION}.lora_adapter_path"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
OF_MODEL = "base_model.model."
"""How PEFT's names of weights begin, before those of the model that is adapted."""


def modules_of_lora(config: DictConfig, made: Any) -> Iterator[Finding]:
    """Whether the model has what ``target_modules`` names, or what the job's adapter was made for.

    Megatron's engine reads ``model.lora`` in its place; ``all-linear`` finds its modules itself.

    Args:
        made: the model, a module of torch.
    """
    model = OmegaConf.select(config, SECTION)
    named, rank = model.target_modules, model.lora_rank
    if path := model.get("lora_adapter_path"):
        yield from _adapter(path, made)
        return
    if not isinstance(rank, int) or rank <= 0 or named in (None, "all-linear"):
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


def _adapter(path: str, made: Any) -> Iterator[Finding]:
    """Whether the weights of an adapter, two matrices A and B for a layer, fit the layers of this model."""
    from torch.nn import Linear

    file = Path(os.path.expanduser(path), ADAPTER_WEIGHTS)
    try:
        if not file.is_file():
            return
        shapes = shapes_in(file)
    except LookupError as problem:
        yield wrong(ADAPTER, f"{path}: {problem}.")
        return
    except OSError as error:
        yield not_looked_at(ADAPTER, f"{path}: {file.name} cannot be read here ({error})")
        return
    layers = {name: each for name, each in made.named_modules() if isinstance(each, Linear)}
    for name, shape in shapes.items():
        adapted, _, matrix = name.removeprefix(OF_MODEL).rpartition(".lora_")
        layer = layers.get(adapted)
        if layer is None or len(shape) != 2 or matrix not in ("A.weight", "B.weight"):
            continue
        is_into = matrix == "A.weight"
        wanted, has = (layer.in_features, shape[1]) if is_into else (layer.out_features, shape[0])
        if wanted != has:
            yield wrong(
                ADAPTER,
                f"{path}: made for another model: its {adapted} {'takes' if is_into else 'gives'} {has} numbers, that "
                f"of this model {wanted}. Name an adapter of this model, or the model that it was made for.",
            )
            return
    yield ok(ADAPTER, f"{path}, with the shapes of this model")
