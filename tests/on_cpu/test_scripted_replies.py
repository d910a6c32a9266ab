"""Scripted replies: noise, the user's texts, and a call of each tool, in turn."""

import json

import pytest
from omegaconf import OmegaConf

from tests.support.own_jobs import TOOL
from verl_padding.on_cpu.rollout.batch_generation import Generation
from verl_padding.on_cpu.scripted_replies import Replies
from verl_padding.on_cpu.tiny_models import make_byte_tokenizer


@pytest.fixture
def rollout(tmp_path, monkeypatch):
    from verl.tools import function_tool

    monkeypatch.setattr(function_tool, "FUNCTION_TOOL_REGISTRY", {})
    (tmp_path / "tool.py").write_text(TOOL)
    turns = {"tool_config_path": None, "function_tool_path": str(tmp_path / "tool.py")}
    return OmegaConf.create({"multi_turn": {**turns, "format": "hermes"}})


def answered(replies, seed):
    request = Generation([1], 100, seed=seed)
    replies.answer(request)
    assert request.is_finished
    assert len(request.log_probs) == len(request.token_ids)
    return request.token_ids


def test_replies_are_noise_each_text_and_a_call_of_each_tool(rollout):
    tokenizer = make_byte_tokenizer()
    replies = Replies(tokenizer, rollout, ["a text"])
    ids = [answered(replies, turn) for turn in range(4)]
    assert all(each[-1] == tokenizer.eos_token_id for each in ids)
    noise, text, call, again = [tokenizer.decode(each[:-1]) for each in ids]
    assert text == "a text"
    assert noise != again
    called = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert called == {"name": "add", "arguments": {"expression": "1 + 2"}}
