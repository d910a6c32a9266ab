"""The recipe's lead and sub-agents on verl's own tool agent loop, with a scripted server in the
place of a model."""

import json

import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import ToolListWrap
from verl.tools.tool_registry import load_all_tools
from verl.workers.config.rollout import MultiTurnConfig

from tests.support import played
from tests.support.played import TOKENIZER
from verl_padding.recipes.subagents.agent_loop import PromptTooLongError, SubagentsLoop
from verl_padding.recipes.subagents.job import HERE
from verl_padding.recipes.subagents.tasks import GSM8K_SOURCE, TINY_SOURCE

ROW = {
    "data_source": TINY_SOURCE,
    "reward_model": {"ground_truth": "ba"},
    "raw_prompt": [],
    "index": 7,
}
MATH_ROW = {
    "data_source": GSM8K_SOURCE,
    "reward_model": {"ground_truth": "42"},
    "raw_prompt": [{"role": "user", "content": "How many rows?"}],
}
FORM = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def play(
    script, *, row=ROW, call_format="terse", prompt_length=600, response_length=400, **settings
):
    multi_turn = OmegaConf.structured(
        MultiTurnConfig(format=call_format, max_parallel_calls=9, max_assistant_turns=4)
    )
    rollout = {
        "prompt_length": prompt_length,
        "response_length": response_length,
        "full_determinism": False,
    }
    tools = ToolListWrap(load_all_tools(str(HERE / "tools.yaml"), None))
    return played.play(
        SubagentsLoop, script, row, rollout | {"multi_turn": multi_turn}, tools=tools, **settings
    )


def own_words(output):
    pairs = zip(output.response_ids, output.response_mask, strict=True)
    return TOKENIZER.decode([token for token, mine in pairs if mine])


def test_a_session_is_a_short_row_of_each_sub_agent_and_one_of_the_lead():
    rows, server = play(
        [("#|#", "2"), ("bbbb", "2"), ("aaaa", "1"), ("1<|im_end|>", "0")], reply_tokens=2
    )
    assert [own_words(row) for row in rows] == ["2", "1", "20"]
    lead, *subagents = server.prompts[:3]
    assert lead == FORM.format("####|####")
    assert sorted(subagents) == [FORM.format("a" * 8), FORM.format("b" * 8)], (
        "asked at once, in any order"
    )
    assert len(rows[-1].response_ids) > 10 * len(rows[0].response_ids)
    assert 0 in rows[-1].response_mask, "the replies of tools are not the model's own"
    assert all(params["max_tokens"] == 2 for _, _, params in server.requests)
    assert [row.extra_fields["role"] for row in rows] == ["subagent", "subagent", "lead"]
    assert rows[-1].reward_score == pytest.approx(1.0)
    assert rows[-1].extra_fields["reward_extra_info"] == {
        "acc": 1.0,
        "parts_right": 1.0,
        "subagents": 2.0,
        "failed_subagents": 0.0,
    }


def test_a_sub_agent_that_fails_costs_its_row_and_the_lead_is_told():
    script = [("#|#", "3"), ("bbbb", "2"), ("aaaa", ""), ("error: there is no part 3", "0")]
    rows, _ = play(script)
    assert [own_words(row) for row in rows] == ["2", "30"]
    said = TOKENIZER.decode(rows[-1].response_ids)
    assert "error: the sub-agent did not reply" in said
    assert "error: there is no part 3" in said
    assert rows[-1].extra_fields["reward_extra_info"]["failed_subagents"] == 2.0
    # Half of the parts right, not as many asked as there are, a sum that is not right.
    assert rows[-1].reward_score == pytest.approx(0.1 + 0.6 / 2 + 0.1)


def test_a_session_whose_lead_is_not_answered_has_no_row():
    rows, server = play([("#|#", "")])
    assert (rows, len(server.requests)) == ([], 1)
    (row,) = play([("#|#", "x")])[0]
    assert row.reward_score == 0


def test_a_task_that_is_too_long_is_refused_by_name():
    with pytest.raises(
        PromptTooLongError, match=r"data\.max_prompt_length=20: row 7 of .* a context of \d+ tokens"
    ):
        play([], prompt_length=20)
    call = {"name": "ask", "arguments": {"question": "very " * 200}}
    script = [
        ("You lead a team", f"<tool_call>{json.dumps(call)}</tool_call>"),
        ("error: a context of", "#### 42"),
    ]
    rows, _ = play(script, row=MATH_ROW, call_format="hermes", response_length=2000)
    assert len(rows) == 1
    assert rows[0].extra_fields["reward_extra_info"]["failed_subagents"] == 1.0
