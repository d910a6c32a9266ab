"""Ranks of verl's Megatron engine in each shape that is trained, and plans for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import (
    ALL_TERMS,
    BUDGETS,
    BUDGETS_OF_CRITICS,
    CUTS,
    assert_updates_agree,
    pad_tokens_of,
)
from tests.support.fsdp2_workers import empty_queue, give_same_head, start_critic, stop
from verl_padding.pads.template import PadTemplate
from verl_padding.worker.losses import wrap_worker_loss

NO_DECAY = "actor_rollout_ref.actor.optim.weight_decay=0"
"""Megatron leaves norms and biases out of it."""
ON_FSDP2 = (*ALL_TERMS, NO_DECAY)
TERMS = (
    "+local=cpu_megatron",
    *ALL_TERMS[:-1],  # all but the setting of its optimizer
    "+actor_rollout_ref.actor.optim.override_optimizer_config.adam_eps=1e-5",
    NO_DECAY,
)
ON_MEGATRON = (*TERMS, *BUDGETS)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Ranks, and how many of them share what."""

    ranks: int = 2
    pipeline_model: int = 1
    virtual_pipeline_model: int = 1
    tensor_model: int = 1
    context: int = 1
    expert_model: int = 1

    @property
    def dp_size(self) -> int:
        return self.ranks // (self.pipeline_model * self.tensor_model * self.context)

    @property
    def planned(self) -> dict[str, Any]:
        """What :func:`assert_updates_agree` must know of it; a virtual pipeline runs multiples of its parts."""
        multiple = self.pipeline_model if self.virtual_pipeline_model > 1 else 1
        sizes = {"dp_size": self.dp_size, "ranks_of_row": self.context, "micro_batch_multiple": multiple}
        return {**sizes, "template": self.template}

    @property
    def cuts(self) -> list[dict[str, Any]]:
        """Where its ranks share every row, none of them holds pads alone."""
        return [cut for cut in CUTS.values() if self.dp_size > 1 or "few" not in cut]

    def settings(self, role: str = "actor_rollout_ref.actor") -> list[str]:
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "ranks"}
        settings = [f"{role}.megatron.{name}_parallel_size={size}" for name, size in sizes.items() if size > 1]
        whole_experts = f"{role}.megatron.expert_tensor_parallel_size=1"
        return [*settings, whole_experts] if self.expert_model > 1 else settings

    @property
    def template(self) -> PadTemplate:
        """Of pads as long as the engine asks."""
        length = pad_tokens_of("+local=cpu_megatron", *self.settings())
        return PadTemplate(eos_token_id=3, length=length, n_experts=lambda: EXPERTS)


LAYERS = 4
"""One for each part of a virtual pipeline, of two parts on each of two ranks."""
EXPERTS = 4


def with_shared_heads(folder: Path, vocab_size: int = 320, **changes: Any) -> Path:
    """The tiny model of a folder, with heads and a vocabulary that two tensor parallel ranks can share."""
    config = AutoConfig.from_pretrained(folder, num_key_value_heads=2, vocab_size=vocab_size, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@contextmanager
def started(workers: RayWorkerGroup, *, padded: bool = False) -> Iterator[RayWorkerGroup]:
    """Workers that are ended with the block."""
    try:
        if padded:
            workers.execute_with_func_generator(wrap_worker_loss("rows"))
        yield workers
    finally:
        stop(workers)
        empty_queue()


CRITIC_TERMS = (
    "+local=cpu_megatron",
    "+critic.optim.override_optimizer_config.adam_eps=1e-5",
    "critic.optim.lr=3e-4",  # a mean of values that is nearly zero shows how rounding grows from step to step
    "critic.cliprange_value=0.5",
)


@contextmanager
def one_critic_of(model: Path) -> Iterator[RayWorkerGroup]:
    """A critic of one rank that sees no pads."""
    with started(start_critic(model, 1, *CRITIC_TERMS, *BUDGETS_OF_CRITICS["plain"])) as critic:
        yield critic


def assert_critics_agree(model: Path, shape: Shape, one_critic: RayWorkerGroup) -> None:
    """Of a shape with the one, however micro-batches are cut."""
    settings = [*shape.settings("critic"), *BUDGETS_OF_CRITICS["padded"]]
    with started(start_critic(model, shape.ranks, *CRITIC_TERMS, *settings), padded=True) as critics:
        for cut in shape.cuts:
            assert_updates_agree(critics, one_critic, **cut, **shape.planned, update="critic", started=give_heads)


def give_heads(*both: RayWorkerGroup) -> None:
    for workers in both:
        give_same_head(workers)
