"""Tiny models with linear attention, as verl patches them, and their float64."""

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from verl.models.transformers.monkey_patch import apply_monkey_patch

from verl_padding.on_cpu import tiny_models

SIZES = tiny_models.SIZES | tiny_models.OF_KIND["qwen3_5"]
SIZES |= {
    "vocab_size": 259,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
}
EXPERTS = tiny_models.OF_KIND["qwen3_moe"] | {"shared_expert_intermediate_size": 32}
TOWER = tiny_models.VISION | {"patch_size": 4}
del TOWER["deepstack_visual_indexes"]
IMAGE, VIDEO, IMAGE_START, IMAGE_END = range(250, 254)
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": IMAGE_START,
    "vision_end_token_id": IMAGE_END,
}


def config_of(kind):
    is_moe = kind.endswith("_moe")
    text = SIZES | (EXPERTS if is_moe else {})
    if kind.startswith("qwen3_next"):
        text = {"num_experts": 0} | text
        text["rope_parameters"] = {
            name: value
            for name, value in text["rope_parameters"].items()
            if not name.startswith("mrope")
        }
        return transformers.Qwen3NextConfig(**text)
    if kind == "qwen3_5_text":
        return transformers.Qwen3_5TextConfig(**text)
    with_tower = transformers.Qwen3_5MoeConfig if is_moe else transformers.Qwen3_5Config
    return with_tower(text_config=text, vision_config=TOWER, **IDS)


def hybrid_model(kind, *, is_critic=False, checkpointed=False, fused=False):
    """A model of random weights whose states last, in float32; verl patches its class."""
    config = config_of(kind)
    auto = transformers.AutoModelForCausalLM
    if is_critic:
        auto = transformers.AutoModelForTokenClassification
        config.get_text_config().num_labels = config.num_labels = 1
    elif hasattr(config, "vision_config"):
        auto = transformers.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = auto.from_config(config)
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):  # as drawn, a state is forgotten within some tokens
                weight.uniform_(-4, 0)
            elif "norm" not in name and weight.dim() > 1:
                weight.mul_(3)
    if is_critic:
        model.dropout = nn.Identity()  # verl sets it to 0
    heads = {"use_fused_kernels": True, "fused_kernels_backend": "torch"} if fused else {}
    apply_monkey_patch(model, use_remove_padding=True, **heads)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class Float64(TorchFunctionMode):
    """Casts to float32, of which norms, gates and rules of transformers have many, are casts to
    float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        is_cast = torch.float32 in args or kwargs.get("dtype") is torch.float32
        if func is torch.Tensor.to and is_cast:
            return args[0].double()
        if func is torch.Tensor.backward:
            # A mode is off in there, where layers that are checkpointed are computed again.
            with Float64():
                one = (torch.ones_like(args[0]),)
                return torch.autograd.Variable._execution_engine.run_backward(
                    args[:1], one, False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        return func(*args, **kwargs)
