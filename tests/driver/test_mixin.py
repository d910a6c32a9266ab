"""The padded trainer's own steps on the real TransferQueue; the workers here only say how many
ranks they have."""

import pytest
import torch

from tests.support.rows_in_queue import put_rows, queue_content
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.job.calls import ACTOR
from verl_padding.pads.prompt_order import place_of

PAD_TOKENS = 2
"""Of a pad of text."""

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def test_prompts_are_fetched_under_uids_that_tell_their_order():
    trainer = padded_trainer()
    trainer.config.data.gen_batch_size = 2
    trainer.train_dataloader, trainer.train_dataloader_it = _Prompts(), None
    places = []
    for step, n_prompts in ((7, 4), (7, 2), (8, 4)):
        trainer.global_steps = step
        batch = trainer._next_train_batch(n_prompts)
        places += [place_of(uid) for uid in batch["uid"]]
        assert batch["index"].tolist() == [0, 1] * (n_prompts // 2)
        assert batch["global_steps"] == step
    assert places == [(7, place) for place in range(6)] + [(8, place) for place in range(4)]


class _Prompts:
    """A data loader of the same two prompts, for ever."""

    def __iter__(self):
        while True:
            yield {"raw_prompt": [[{"role": "user", "content": "?"}]] * 2, "index": torch.arange(2)}


def test_the_batch_keeps_its_rows_and_metrics_tell_of_the_plan():
    trainer, metrics = padded_trainer(), {}
    batch = put_rows([(5, 3), (7, 2), (4, 9), (6, 1), (20, 9), (3, 3), (4, 4)])
    keys = list(batch.keys)
    returned = trainer._balance_batch(batch, metrics)
    assert returned is batch
    assert batch.keys == keys
    assert metrics["padding/real_rows/total"] == 7
    assert metrics["padding/actor/optimizer_steps/total"] == 2
    assert metrics["padding/pad_rows/total"] == trainer.steps.current.plan.n_pads > 0
    layout, lengths = (
        trainer.steps.current.plan.layouts[ACTOR],
        [tag["seq_len"] for tag in batch.tags],
    )
    tokens_D = [
        sum(
            lengths[row] if row < 7 else PAD_TOKENS
            for local_batches in layout.local_batches
            for row in local_batches[rank]
        )
        for rank in (0, 1)
    ]
    assert layout.n_pads > 0
    assert sum(tokens_D) == sum(lengths) + PAD_TOKENS * layout.n_pads
    assert metrics["global_seqlen/mean"] == sum(tokens_D) / 2, "what a rank gets, as verl counts it"
    assert metrics["global_seqlen/balanced_min"] == min(tokens_D)
    assert metrics["global_seqlen/balanced_max"] == max(tokens_D)
    assert len(queue_content()) == 7 + trainer.steps.current.plan.n_pads
