"""The padded trainer's own steps on the real TransferQueue; the workers here only say how many
ranks they have."""

import pytest
import torch

from tests.support.trainer_without_workers import padded_trainer
from verl_padding.pads.prompt_order import place_of

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
