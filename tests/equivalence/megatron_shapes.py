"""Ranks of verl's Megatron engine in each shape that is trained, and plans for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transfer_queue import KVBatchMeta
from transformers import AutoConfig, AutoModelForCausalLM
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.test_actor_update import assert_metrics_agree
from tests.equivalence.test_critic_update import assert_critic_metrics_agree
from tests.equivalence.updates import (
    ALL_TERMS,
    BUDGET,
    BUDGETS,
    PACKERS,
    assert_cut_as_told,
    pad_tokens_of,
    put_few_rows,
    put_trained_rows,
    update_both_with,
)
from tests.support.fsdp2_workers import empty_queue, give_same_head, start_critic, start_over, stop
from verl_padding.pads.template import PadTemplate
from verl_padding.plan import BatchPlan, Job, Pass, Rows, Update, plan_batch
from verl_padding.worker.losses import wrap_worker_loss
from verl_padding.worker.plan_packer import install

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
    def micro_batch_multiple(self) -> int:
        return self.pipeline_model if self.virtual_pipeline_model > 1 else 1

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


def plan_for(
    batch: KVBatchMeta,
    packer: str,
    shape: Shape,
    prompts: int = 6,
    micro_batch_rows: int | None = None,
    update: str = "actor",
) -> BatchPlan:
    """Three mini-batches; and, by a token budget, a pass."""
    sizes: dict[str, Any] = {"dp_size": shape.dp_size, "micro_batch_multiple": shape.micro_batch_multiple}
    if micro_batch_rows is None:
        sizes["token_budget"] = BUDGET * shape.context
    else:
        sizes["micro_batch_rows"] = micro_batch_rows
    job = Job(
        strategy="prompt",
        prompts=prompts,
        sessions_per_prompt=2,
        updates={update: Update(**sizes, prompts_per_mini_batch=prompts // 3)},
        inference={"log_prob": Pass(**sizes)} if micro_batch_rows is None else {},
        packer=packer,
        pad_tokens=shape.template.length,
    )
    plan = plan_batch(Rows.from_keys(batch.keys, [tag["seq_len"] for tag in batch.tags]), job)
    assert plan.layouts[update].n_mini_batches == 3
    return plan


def start_both_over(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, mode: str, packer: str, micro_batch_rows: int | None = None
) -> None:
    start_over(one_rank, mode)
    start_over(padded_ranks, mode, micro_batch_rows)
    if packer == "plan":
        padded_ranks.execute_with_func_generator(install())


def assert_agrees_where_some_hold_pads_alone(
    padded_ranks: RayWorkerGroup, one_rank: RayWorkerGroup, packer: str, shape: Shape, batch: KVBatchMeta
) -> None:
    plan = plan_of_idle_ranks(batch, packer, shape, "actor")
    both = update_both_with(padded_ranks, one_rank, batch, plan, shape.template)
    assert_metrics_agree(both)
    assert_cut_as_told(both, packer)


def plan_of_idle_ranks(batch: KVBatchMeta, packer: str, shape: Shape, update: str) -> BatchPlan:
    plan = plan_for(batch, packer, shape, prompts=3, update=update)
    assert plan.layouts[update].reporting_ranks_M == (1, 1, 2), "one group of ranks was meant to hold pads alone"
    return plan


CRITIC_TERMS = (
    "+local=cpu_megatron",
    "+critic.optim.override_optimizer_config.adam_eps=1e-5",
    "critic.optim.lr=3e-4",  # a mean of values that is nearly zero shows how rounding grows from step to step
    "critic.cliprange_value=0.5",
)
BUDGET_OF_CRITIC = "+critic.ppo_infer_max_token_len_per_gpu={}"


@contextmanager
def one_critic_of(model: Path) -> Iterator[RayWorkerGroup]:
    """A critic of one rank that sees no pads."""
    with started(start_critic(model, 1, *CRITIC_TERMS, BUDGET_OF_CRITIC.format(4096))) as critic:
        yield critic


def assert_critics_agree(model: Path, shape: Shape, one_critic: RayWorkerGroup) -> None:
    """Of a shape with the one, however micro-batches are cut; also where some hold pads alone."""
    settings = [*shape.settings("critic"), BUDGET_OF_CRITIC.format(BUDGET)]
    with started(start_critic(model, shape.ranks, *CRITIC_TERMS, *settings), padded=True) as critics:

        def assert_agree(mode: str, packer: str, batch: KVBatchMeta, plan: BatchPlan, rows: int | None = None) -> None:
            start_both_over(critics, one_critic, mode, packer, rows)
            for workers in (critics, one_critic):
                give_same_head(workers)
            both = update_both_with(critics, one_critic, batch, plan, shape.template, method="train_mini_batch")
            assert_critic_metrics_agree(both)
            assert_cut_as_told(both, packer, rows, "critic")

        for (mode, rows), packer in product((("token-mean", None), ("seq-mean-token-sum", 2)), PACKERS):
            batch = put_trained_rows()
            plan = plan_for(batch, packer, shape, micro_batch_rows=rows, update="critic")
            assert_agree(mode, packer, batch, plan, rows)
        for packer in PACKERS if shape.dp_size > 1 else ():
            batch = put_few_rows()
            assert_agree("token-mean", packer, batch, plan_of_idle_ranks(batch, packer, shape, "critic"))
