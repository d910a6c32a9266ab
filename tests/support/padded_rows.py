"""Pads put into the queue beside real rows, as a step of the padded trainer does it."""

import torch

from verl_padding.pads.loss_weighting import LossWeighting
from verl_padding.pads.padded_batch import PaddedBatch
from verl_padding.plan import Job, Pass, Rows, Update, plan_batch
from verl_padding.plan.row_keys import uid_of_key

DEFAULT_WEIGHTING = LossWeighting(mode="seq-mean-token-mean")


def plan_for(batch, *, dp_size=2, mini=1):
    rows = Rows.from_keys(batch.keys, [tag["seq_len"] for tag in batch.tags])
    prompts = len({uid_of_key(key) for key in batch.keys})
    call = {"dp_size": dp_size, "token_budget": 512}
    job = Job(
        strategy="prompt",
        prompts=-(-prompts // mini) * mini,
        sessions_per_prompt=1,
        updates={"actor": Update(**call, prompts_per_mini_batch=mini)},
        inference={"log_prob": Pass(**call)},
        pad_tokens=4,
    )
    return plan_batch(rows, job)


def upsample(batch, plan, template, weighting=DEFAULT_WEIGHTING):
    """The batch with its pads in TransferQueue; `strip` takes them out."""
    padded = PaddedBatch(batch, plan, template, weighting=weighting)
    padded.put_pads()
    return padded


def values_of(columns):
    """Fields of the first of the pads that a template makes."""
    plain = {
        name: column if isinstance(column, torch.Tensor) else column.tolist()
        for name, column in columns.items()
    }
    return {name: column[0] for name, column in plain.items()}
