"""One rank of verl's actor worker, with its FSDP2 engine, in this process."""

import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.one_gpu.rows import SAID, Row, micro_batch_of, pad_of
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.vendor import VARIABLE, VENDOR
from verl_padding.on_cpu.tiny_models import make_byte_tokenizer
from verl_padding.pads.planned_call import (
    BATCH_ROW,
    CALL,
    IS_PADDING,
    MINI_BATCH,
    MiniBatch,
    PlannedCall,
    cut_into,
    mini_batches,
)
from verl_padding.plan import BatchPlan

SIZES = {
    "small": (128, 256, 2, 4, 2, True),
    "wide": (512, 2048, 2, 8, 4, False),
    "exact": (512, 1024, 4, 8, 2, False),
    "0.5B": (896, 4864, 24, 14, 2, True),
}
"""Those of Qwen2.5: hidden size, intermediate size, layers, heads, heads of keys, whether
embeddings are tied."""
SIZE_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "tie_word_embeddings"),
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def make_model(folder: Path, size: str, kind: str, vocabulary: int, device: str) -> Path:
    """A model of random weights, in bfloat16 where it is large."""
    import transformers

    tokenizer = make_byte_tokenizer()
    sizes: dict[str, Any] = dict(zip(SIZE_NAMES, SIZES[size], strict=True))
    if kind != "qwen2":
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    if kind == "qwen3_5_text":
        sizes |= linear_layers(sizes)
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = transformers.AutoConfig.for_model(
        kind, **sizes, **ids, vocab_size=vocabulary, max_position_embeddings=32768
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # as drawn, a state is forgotten within some tokens
            torch.nn.init.uniform_(weight, -4, 0)
    place = folder / f"{kind}-{size}-{vocabulary}"
    model.to(torch.float32 if vocabulary < 1000 else torch.bfloat16).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def linear_layers(sizes: dict[str, Any]) -> dict[str, Any]:
    """Those of a Qwen3.5: three in four layers, as many heads as fit, each of the size of the
    others'."""
    layers, heads, head_dim = (
        sizes[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim")
    )
    kinds = ["linear_attention" if (n + 1) % 4 else "full_attention" for n in range(layers)]
    return {
        "layer_types": [*kinds[:-1], "full_attention"],
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        | {"mrope_section": [head_dim // 8, head_dim // 16, head_dim // 16]}
        | {"mrope_interleaved": True},
    }


def start_worker(model: Path, dtype: str, budget: int, device: str, *overrides: str) -> Any:
    """verl's actor worker with the engine of a padded job; its learning rate is 0."""
    os.environ[VARIABLE] = VENDOR
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from verl_padding.worker.padded_engine import register_padded_engines

    actor, rollout, model_section = (
        f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model")
    )
    fsdp = f"{actor}.fsdp_config"
    precision = {"param": dtype, "reduce": "fp32", "buffer": "fp32"}
    said = (
        *(["+local=cpu"] if device == "cpu" else []),
        f"{model_section}.path={model}",
        f"++{model_section}.override_config.attn_implementation=sdpa",
        f"{model_section}.use_remove_padding=true",
        f"{actor}.strategy=fsdp2",
        f"{fsdp}.strategy=fsdp2",
        f"{fsdp}.model_dtype=fp32",
        f"{fsdp}.dtype={DTYPES[dtype]}",
        *(f"++{fsdp}.mixed_precision.{name}_dtype={value}" for name, value in precision.items()),
        f"{fsdp}.use_torch_compile=false",
        f"{actor}.use_torch_compile=false",
        f"{actor}.use_dynamic_bsz=true",
        f"{rollout}.log_prob_use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={budget}",
        f"{rollout}.log_prob_max_token_len_per_gpu={budget}",
        f"{actor}.ppo_mini_batch_size=2",
        f"{actor}.optim.lr=0",
        f"{actor}.optim.total_training_steps=1000",
        "algorithm.adv_estimator=grpo",
        *overrides,
    )
    config = compose_job(JobArguments(overrides=said))
    register_padded_engines()
    worker = ActorRolloutRefWorker(
        config=config.actor_rollout_ref, role="actor", distillation_config=config.distillation
    )
    worker.init_model()
    return worker


def rows_of_call(
    rows: Mapping[str, Row],
    plan: BatchPlan | None = None,
    call: str = "actor",
    *,
    drops_rows: bool = False,
    takes_own_log_probs: bool = False,
    **said: Any,
) -> TensorDict:
    """The rows of a worker call as a padded trainer sends them; as stock verl does, without a
    plan."""
    from verl.utils import tensordict_utils as tu

    fields, n_rows = list(rows.values()), len(rows)
    to_worker: dict[str, Any] = SAID | {"global_batch_size": n_rows}
    if plan is None:
        data = micro_batch_of(fields)
        to_worker |= {"mini_batch_size": n_rows, "dataloader_kwargs": {"shuffle": False}}
    else:
        layout = plan.layouts[call]
        pad = pad_of(fields)
        data = micro_batch_of([fields[row] if row < n_rows else pad for row in layout.order])
        tries = plan.tries if plan.job.sharing == "on" else None
        steps: list[MiniBatch] = []
        if call == "actor":
            trained = [int(row["response_mask"].sum()) for row in fields]
            steps = mini_batches(layout, trained, trained, drops_rows=drops_rows)
            to_worker |= cut_into(layout) | {MINI_BATCH: steps[0]}
        to_worker[CALL] = PlannedCall(
            layout=layout,
            may_branch=True if tries else None,
            position_R=tries.dfs_position_R.tolist() if tries else (),
            takes_own_log_probs=takes_own_log_probs,
            mini_batches=deque(steps),
        )
        data[BATCH_ROW] = torch.tensor(layout.order)
        data[IS_PADDING] = data[BATCH_ROW] >= n_rows
    tu.assign_non_tensor(data, **to_worker | said)
    return data


def gradient_of(engine: Any) -> torch.Tensor:
    """All gradients, in float64 on the CPU."""
    with_gradient = (
        weight.grad for weight in engine.module.parameters() if weight.grad is not None
    )
    return torch.cat(
        [gradient.full_tensor().double().cpu().flatten() for gradient in with_gradient]
    )


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, of two gradients."""
    return float((found - wanted).norm() / wanted.norm())
