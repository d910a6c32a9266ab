"""The recipe's tasks and agent loop: everything short of running it."""

from itertools import pairwise

import pytest

from tests.support import played
from verl_padding.on_cpu.tiny_models import make_byte_tokenizer
from verl_padding.recipes.every_call.agent_loop import EveryCallLoop
from verl_padding.recipes.every_call.tasks import TINY_SOURCE
from verl_padding.recipes.every_call.thinking import ThinkingLoop

ROW = {"data_source": TINY_SOURCE, "reward_model": {"ground_truth": "3"}}
END = "<|im_end|>"
FIRST = f"<|im_start|>user\n????????{END}\n<|im_start|>assistant\n"
NEXT = f"<|im_start|>user\n{{}}{END}\n<|im_start|>assistant\n"


def play(replies, *, max_calls=8, prompt_length=300, response_length=2, row=ROW):
    """By default with the prize behind door 3."""
    rollout = {"prompt_length": prompt_length, "response_length": response_length}
    return played.play(EveryCallLoop, replies, row, rollout, max_calls=max_calls)


def test_each_call_is_a_row_that_extends_the_one_before_it_and_says_so():
    outputs, server = play([f"1{END}", f"2{END}", f"3{END}"])
    second = FIRST + f"1{END}" + NEXT.format("1" * 8)
    third = second + f"2{END}" + NEXT.format("2" * 8)
    assert server.prompts == [FIRST, second, third]
    for before, output in pairwise(outputs):
        row = before.prompt_ids + before.response_ids
        assert output.prompt_ids[: len(row)] == row
    assert [output.extra_fields.get("extends") for output in outputs] == [None, 0, 1]
    assert [output.response_mask for output in outputs] == [[1, 1]] * 3
    assert outputs[-1].reward_score == 1.0
    assert outputs[-1].extra_fields["reward_extra_info"] == {"acc": 1.0, "tried": 3.0, "calls": 3.0}


def test_calls_are_limited_and_an_empty_reply_ends_the_session():
    outputs, _ = play(["1", "2", "4"], max_calls=2)
    assert len(outputs) == 2
    assert outputs[-1].reward_score == pytest.approx(0.5 * 2 / 4)
    assert play([""])[0] == []
    outputs, server = play(["1", ""])
    assert (len(outputs), len(server.requests)) == (1, 2)


def test_a_context_that_outgrows_the_prompt_ends_the_session():
    outputs, server = play([f"1{END}", f"2{END}", f"4{END}"], prompt_length=len(FIRST) + 10)
    assert len(outputs) == len(server.requests) < 3
    with pytest.raises(
        ValueError, match=r"data\.max_prompt_length=5: row 7 of .* a context of \d+ tokens"
    ):
        play(["1"], prompt_length=5, row=ROW | {"index": 7})


def test_what_was_thought_is_left_out_of_the_next_prompt():
    tokenizer = make_byte_tokenizer(thinks=True)
    rollout = {"prompt_length": 300, "response_length": 6}
    said = ["hmm</think>", "1", "so 2", "2", "3</think>", "3"]
    outputs, server = played.play(ThinkingLoop, said, ROW, rollout, tokenizer, max_thinking=4)
    second = FIRST + f"1{END}\n" + NEXT.format("1" * 8)
    third = second + f"2{END}\n" + NEXT.format("2" * 8)
    prompts = [tokenizer.decode(output.prompt_ids) for output in outputs]
    assert prompts == [f"{said}<think>" for said in (FIRST, second, third)]
    thoughts = ["hmm</think>", "so 2</think>", "3</think>"]
    assert server.prompts[1::2] == [
        prompt + thought for prompt, thought in zip(prompts, thoughts, strict=True)
    ]
    rows = [tokenizer.decode(output.response_ids) for output in outputs]
    assert rows == ["hmm</think>1", "so 2</think>2", "3</think>3"]
    # The second thought was ended for the model: no token of its own.
    assert [output.response_mask for output in outputs] == [[1] * 5, [1] * 4 + [0, 1], [1] * 3]
    assert [output.extra_fields.get("extends") for output in outputs] == [None] * 3
    assert [limits["max_tokens"] for *_, limits in server.requests] == [4, 1] * 3
