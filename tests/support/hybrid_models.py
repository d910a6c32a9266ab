"""Tiny models with linear attention, as verl patches them, and their float64."""

from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForTokenClassification
from verl.models.transformers.monkey_patch import apply_monkey_patch

TEXT = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 8192,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}}
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
TOWER |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
TOWER |= {"out_hidden_size": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 32}
IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
CONFIGS = {
    "qwen3_5": lambda: transformers.Qwen3_5Config(
        text_config=TEXT | MROPE,
        vision_config=TOWER,
        **{name: 250 + number for number, name in enumerate(IMAGE_TOKENS)},
    ),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeConfig(
        text_config=TEXT | MROPE | EXPERTS,
        vision_config=TOWER,
        **{name: 250 + number for number, name in enumerate(IMAGE_TOKENS)},
    ),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**TEXT | MROPE),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**TEXT, num_experts=0, rope_parameters=ROPE),
    "qwen3_next_moe": lambda: transformers.Qwen3NextConfig(**TEXT | EXPERTS, rope_parameters=ROPE),
}


def hybrid_model(kind: str, *, is_critic: bool = False, checkpointed: bool = False) -> nn.Module:
    """A model of random weights whose states last, in float32."""
    config = CONFIGS[kind]()
    classes: dict[str, Any] = {"qwen3_5": transformers.Qwen3_5ForConditionalGeneration}
    classes["qwen3_5_moe"] = transformers.Qwen3_5MoeForConditionalGeneration
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if is_critic:
            config.get_text_config().num_labels = config.num_labels = 1
            model = AutoModelForTokenClassification.from_config(config)
            model.dropout = nn.Identity()  # verl sets it to 0
        elif kind in classes:
            model = classes[kind](config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("A_log"):  # as drawn, a state is forgotten within some tokens
                    weight.uniform_(-4, 0)
                elif "norm" not in name and weight.dim() > 1:
                    weight.mul_(3)
    apply_monkey_patch(model, use_remove_padding=True)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class Float64(TorchFunctionMode):
    """Casts to float32, of which norms, gates and rules of transformers have many, are casts to
    float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
