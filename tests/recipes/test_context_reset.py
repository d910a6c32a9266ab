"""The recipe's agent loop, tasks and pictures: everything short of running it."""

import pytest

from tests.support import played
from verl_padding.recipes.context_reset.agent_loop import ContextResetAgentLoop
from verl_padding.recipes.context_reset.tasks import GSM8K_SOURCE, TINY_SOURCE

ROW = {"data_source": TINY_SOURCE, "reward_model": {"ground_truth": "21"}, "raw_prompt": []}
MATH_ROW = {
    "data_source": GSM8K_SOURCE,
    "reward_model": {"ground_truth": "42"},
    "raw_prompt": [{"role": "user", "content": "How many?"}],
}
FORM = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def play(replies, *, max_turns=8, prompt_length=100, response_length=2, row=ROW):
    """By default on the path 2, 1."""
    rollout = {"prompt_length": prompt_length, "response_length": response_length}
    return played.play(ContextResetAgentLoop, replies, row, rollout, max_turns=max_turns)


def test_each_turn_is_a_row_in_a_context_of_its_own():
    outputs, server = play(["2", "1!"])
    assert server.prompts == [FORM.format("b" * 8), FORM.format("a" * 8)]
    assert [output.response_mask for output in outputs] == [[1], [1, 1]]
    assert outputs[-1].reward_score == pytest.approx(1.0)
    assert outputs[-1].extra_fields["reward_extra_info"] == {
        "acc": 1.0,
        "walked": 1.0,
        "turns": 2.0,
    }


@pytest.mark.parametrize(
    ("replies", "settings", "lengths", "requests", "reward"),
    [
        # Wrong replies and empty ones end the session, replies are cut, turns are limited.
        (["3", "1"], {}, [1], 1, 0.1),
        (["2", ""], {}, [1], 2, 0.9 / 2 + 0.1),
        (["2abc", "1"], {}, [2, 1], 2, 0.9 + 0.1),
        (["2", "1"], {"max_turns": 1}, [1], 1, 0.9 / 2 + 0.1),
    ],
)
def test_sessions_end(replies, settings, lengths, requests, reward):
    outputs, server = play(replies, **settings)
    assert [len(output.response_ids) for output in outputs] == lengths
    assert len(server.requests) == requests
    assert outputs[-1].reward_score == pytest.approx(reward)


def test_notes_that_outgrow_the_prompt_end_the_session():
    note = "six rows of seven, "
    outputs, server = play([note] * 8, prompt_length=380, response_length=40, row=MATH_ROW)
    assert 1 < len(outputs) < 8
    for turn, prompt in enumerate(server.prompts):
        assert "How many?" in prompt
        assert prompt.count(note.strip()) == turn
    assert outputs[-1].reward_score == 0.0
    assert outputs[-1].extra_fields["reward_extra_info"]["answered"] == 0.0
