"""The shapes in which a CPU runs verl's engines, and what ranks of each are started with."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.fsdp2_workers import start_actor, start_critic, stop
from tests.support.updates import BUDGET, CUTS
from tests.support.verl_config import compose_job
from verl_padding.config import MIN_PAD_LENGTH
from verl_padding.job.role_engine import ACTOR_SECTION, worker_engine
from verl_padding.on_cpu.tiny_models import TinyModelKind
from verl_padding.pads.template import PadTemplate

LAYERS = 4  # one for each part of a virtual pipeline, of two parts on each of two ranks
EXPERTS = 4
ROLES = {"actor": "actor_rollout_ref.actor", "critic": "critic"}
TERMS = {
    "actor": [
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.loss_scale_factor=16",
    ],
    "critic": ["critic.cliprange_value=0.5"],
}
BUDGETS = (
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
)
LORA_RANK = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Ranks, and how many of them share what."""

    engine: str = "fsdp"
    kind: TinyModelKind = "qwen2"
    update: str = "actor"
    ranks: int = 2
    ranks_of_row: int = 1  # by Ulysses or context parallelism
    pipeline: int = 1
    virtual_pipeline: int = 1
    tensor: int = 1
    expert: int = 1
    lora: bool = False

    @property
    def dp_size(self):
        return self.ranks // (self.pipeline * self.tensor * self.ranks_of_row)

    @property
    def marks(self):
        return [] if self.engine == "fsdp" else [getattr(pytest.mark, self.engine)]

    @property
    def settings(self):
        role = ROLES[self.update]
        match self.engine:
            case "fsdp":
                section = f"{role}.fsdp" if self.update == "critic" else role
                sizes = {f"{section}.ulysses_sequence_parallel_size": self.ranks_of_row}
            case "veomni":
                sizes = {f"{role}.veomni.ulysses_parallel_size": self.ranks_of_row}
            case _:
                fields = {
                    "pipeline_model": self.pipeline,
                    "virtual_pipeline_model": self.virtual_pipeline,
                    "tensor_model": self.tensor,
                    "context": self.ranks_of_row,
                    "expert_model": self.expert,
                }
                sizes = {
                    f"{role}.megatron.{name}_parallel_size": size for name, size in fields.items()
                }
        whole_experts = (
            [f"{role}.megatron.expert_tensor_parallel_size=1"] if self.expert > 1 else []
        )
        return [f"{name}={size}" for name, size in sizes.items() if size > 1] + whole_experts

    @cached_property
    def planned(self):
        """What :func:`assert_updates_agree` must know of it; a virtual pipeline runs multiples of
        its parts."""
        actor_shape = replace(self, update="actor")
        local = "cpu" if self.engine == "fsdp" else f"cpu_{self.engine}"
        engine = worker_engine(compose_job(f"+local={local}", *actor_shape.settings), ACTOR_SECTION)
        return {
            "dp_size": self.dp_size,
            "ranks_of_row": self.ranks_of_row,
            "micro_batch_multiple": self.pipeline if self.virtual_pipeline > 1 else 1,
            "template": PadTemplate(
                eos_token_id=3, length=max(MIN_PAD_LENGTH, engine.row_multiple)
            ),
        }

    @property
    def cuts(self):
        """Where its ranks share every row, none of them holds pads alone; what rows share on other
        engines is in test_sharing_on_megatron.py and test_sharing_on_veomni.py."""
        without = {"few"} if self.dp_size == 1 else set()
        without |= {"sharing"} if self.engine != "fsdp" else set()
        return [cut for cut in CUTS.values() if not without & cut.keys()]

    @property
    def reference(self):
        """One rank of FSDP2, which computes the model of Hugging Face."""
        return Shape(kind=self.kind, update=self.update, ranks=1, lora=self.lora)


def overrides_of(shape):
    """Loss, optimizer and engine of a role; a reference has verl's own token budgets."""
    role = ROLES[shape.update]
    eps = {"fsdp": ["eps"], "megatron": ["adam_eps"], "veomni": []}[shape.engine]
    found = [f"+{role}.optim.override_optimizer_config.{name}=1e-5" for name in eps]
    found += [
        *TERMS[shape.update],
        f"{role}.optim.weight_decay=0",
    ]  # Megatron leaves norms and biases out of it
    if shape.update == "critic":
        found.append(
            f"+critic.ppo_infer_max_token_len_per_gpu={4096 if shape.ranks == 1 else BUDGET}"
        )
        found.append(
            "critic.optim.lr=3e-4"
        )  # a mean of values that is nearly zero shows how rounding grows
    elif shape.ranks > 1:
        found += [f"{setting}={BUDGET}" for setting in BUDGETS]
    if shape.engine != "fsdp":
        found.append(f"+local=cpu_{shape.engine}")
    if shape.engine == "veomni":
        found.append(f"{role}.optim.lr_scheduler_type=constant")
    return found + shape.settings


@contextmanager
def started(shape, model, *more, padded=None):
    """Workers that are ended with the block; ``model`` is that of ``model_of``.

    Args:
        padded: whether they have the engines of a padded job; by default not the one rank,
            except where its packed rows would see each other.
    """
    if padded is None:
        padded = shape.ranks > 1 or shape.kind == "qwen3_5"
    if shape.lora:
        adapter = make_adapter(model, model.parent / f"{model.name}_adapter")
        adapter_setting = f"+actor_rollout_ref.model.lora_adapter_path={adapter}"
        more += (f"actor_rollout_ref.model.lora_rank={LORA_RANK}", adapter_setting)
    starts = start_critic if shape.update == "critic" else start_actor
    workers = starts(model, shape.ranks, *overrides_of(shape), *more, padded=padded)
    try:
        yield workers
    finally:
        stop(workers)


def with_shared_heads(folder):
    """The tiny model of a folder, with layers, heads and a vocabulary that ranks of each shape can
    share."""
    # A mixture of experts has layers of one kind, and does not say so.
    kinds = getattr(AutoConfig.from_pretrained(folder), "layer_types", None)
    shared = {"num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    if kinds:
        shared["layer_types"] = (kinds * LAYERS)[:LAYERS]
    config = AutoConfig.from_pretrained(folder, vocab_size=320, **shared)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_adapter(model, folder):
    """An adapter with weights other than zero, on all linear layers."""
    config = LoraConfig(
        task_type="CAUSAL_LM", r=LORA_RANK, lora_alpha=8, target_modules="all-linear"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder)
    return folder


FSDP = {
    "four ranks": Shape(ranks=4),
    "experts on four ranks": Shape(kind="qwen3_moe", ranks=4),
    "linear attention": Shape(kind="qwen3_5"),
    "adapters": Shape(lora=True),
    "critic on four ranks": Shape(update="critic", ranks=4),
    "Ulysses, experts": Shape(ranks=4, ranks_of_row=2, kind="qwen3_moe"),
    "Ulysses, critic": Shape(ranks=4, ranks_of_row=2, update="critic"),
}
VEOMNI = {
    "dp2": Shape(engine="veomni"),
    "two ranks to a row x dp2": Shape(engine="veomni", ranks=4, ranks_of_row=2),
    "experts, two ranks to a row": Shape(engine="veomni", ranks_of_row=2, kind="qwen3_moe"),
    "critic, two ranks to a row": Shape(engine="veomni", ranks_of_row=2, update="critic"),
}
DENSE = {
    "dp2": {},
    "tp2": {"tensor": 2},
    "cp2": {"ranks_of_row": 2},
    "pp2 vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "pp2 x dp2": {"ranks": 4, "pipeline": 2},
    "tp2 x cp2": {"ranks": 4, "tensor": 2, "ranks_of_row": 2},
}
# Ranks that share a row's tensors also cut its tokens among them (sequence parallel), and send
# those to experts, which are cut themselves where they are not shared out.
MIXTURES = {name: DENSE[name] for name in ("dp2", "tp2", "cp2", "pp2 vpp2", "pp2 x dp2")} | {
    "ep2": {"expert": 2},
    "tp2 with ep2, twice": {"ranks": 4, "tensor": 2, "expert": 2},
}
MEGATRON = {
    **{name: Shape(engine="megatron", **sizes) for name, sizes in DENSE.items()},
    **{
        f"experts, {name}": Shape(engine="megatron", kind="qwen3_moe", **sizes)
        for name, sizes in MIXTURES.items()
    },
}
SHAPES = {
    f"{engine}: {name}": shape
    for engine, shapes in (("FSDP2", FSDP), ("VeOmni", VEOMNI), ("Megatron", MEGATRON))
    for name, shape in shapes.items()
}
