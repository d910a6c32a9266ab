"""The recipe that is made to be copied: its game, its data, and the folder of a real model."""

import pandas as pd
import pytest

from tests.support import played
from verl_padding.recipes.guess.guess_loop import GuessLoop
from verl_padding.recipes.guess.make_data import write_data

ROW = {
    "raw_prompt": [{"role": "user", "content": "?"}],
    "reward_model": {"ground_truth": "6"},
    "extra_info": {"top": 15},
}
FIRST = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\nMy guess is"
NEXT = " {}<|im_end|>\n<|im_start|>user\n{}.<|im_end|>\n<|im_start|>assistant\nMy guess is"


def play(*replies):
    return played.play(GuessLoop, replies, ROW, {"prompt_length": 300, "response_length": 3})


def test_each_guess_is_a_row_and_is_told_higher_or_lower():
    outputs, server = play(" 3!", "8\n\n", " 6")
    second = FIRST + NEXT.format(3, "Higher")
    assert server.prompts == [FIRST, second, second + NEXT.format(8, "Lower")]
    assert all(all(output.response_mask) for output in outputs)
    assert outputs[-1].reward_score == 1.0
    assert outputs[-1].extra_fields["reward_extra_info"] == {"won": 1.0, "guesses": 3.0}


@pytest.mark.parametrize(
    ("replies", "rows", "reward"),
    [
        (["6"], 1, 1.0),
        (["6 or 7"], 1, 1.0),
        (["1", "2", "3", "4", "6"], 4, 0.1),  # too many
        (["5", "16"], 2, 0.1 / 4),
        (["0"], 1, 0.0),
        (["5", "6", "7"], 2, 1.0),
        (["1", "six"], 2, 0.1 / 4),
        (["1", ""], 1, 0.1 / 4),  # an aborted request is no row
    ],
)
def test_a_session_ends_with_the_number_or_what_is_no_guess(replies, rows, reward):
    outputs, _ = play(*replies)
    assert len(outputs) == rows
    assert outputs[-1].reward_score == pytest.approx(reward)


def test_each_batch_has_each_number_once(tmp_path):
    write_data(tmp_path, top=9)
    rows = pd.read_parquet(tmp_path / "train.parquet")
    assert rows["prompt"].map(lambda prompt: "from 1 to 9," in prompt[0]["content"]).all()
    found = [int(each["ground_truth"]) for each in rows["reward_model"]]
    for start in range(0, len(found), 9):
        assert sorted(found[start : start + 9]) == [*range(1, 10)]
