"""The recipe's agent loop, data and job: everything short of running it, which the end-to-end tests and the demo do."""

import asyncio
import io
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf
from PIL import Image
from verl.experimental.agent_loop.agent_loop import DictConfigWrap

from tests.support.scripted_server import ScriptedServer
from tests.support.verl_config import compose_job
from verl_padding.job.job_reader import check_job
from verl_padding.local.tiny_models import make_byte_tokenizer
from verl_padding.recipes.context_reset.agent_loop import ContextResetAgentLoop
from verl_padding.recipes.context_reset.job import tiny_job
from verl_padding.recipes.context_reset.make_data import write_tiny_data
from verl_padding.recipes.context_reset.tasks import GSM8K_SOURCE, SYMBOLS, TINY_SOURCE, task_of

ROW = {"data_source": TINY_SOURCE, "reward_model": {"ground_truth": "21"}, "raw_prompt": []}


def play(replies, *, max_turns=8, prompt_length=100, response_length=2, row=None):
    """Rows of a session, by default on the path 2, 1, and the server that was asked."""
    tokenizer = make_byte_tokenizer()
    server = ScriptedServer(tokenizer, replies)
    rollout = {"prompt_length": prompt_length, "response_length": response_length}

    async def run():
        loop = ContextResetAgentLoop(
            trainer_config=DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})),
            server_manager=server,
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(OmegaConf.create({})),
            max_turns=max_turns,
        )
        return await loop.run({}, **(row or ROW))

    return asyncio.run(run()), server


def test_each_turn_is_a_row_in_a_context_of_its_own():
    outputs, server = play(["2", "1!"])
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert [prompt for _, prompt in server.requests] == [form.format("b" * 8), form.format("a" * 8)]
    assert len({request for request, _ in server.requests}) == 2
    assert [len(output.response_ids) for output in outputs] == [1, 2]
    for output in outputs:
        assert output.response_mask == [1] * len(output.response_ids)
        assert output.response_logprobs == [-0.5] * len(output.response_ids)
        assert output.extra_fields["global_steps"] == 3
    assert outputs[0].reward_score is None
    assert outputs[-1].reward_score == pytest.approx(1.0)
    assert outputs[-1].extra_fields["reward_extra_info"] == {"acc": 1.0, "walked": 1.0, "turns": 2.0}


def test_a_wrong_reply_ends_the_session():
    outputs, server = play(["3", "1"])
    assert len(outputs) == len(server.requests) == 1
    assert outputs[-1].reward_score == pytest.approx(0.1)


def test_replies_are_cut_to_the_response_length():
    outputs, _ = play(["2abc", "1"])
    assert [len(output.response_ids) for output in outputs] == [2, 1]


def test_turns_are_limited():
    outputs, _ = play(["2", "1"], max_turns=1)
    assert len(outputs) == 1
    assert outputs[-1].reward_score == pytest.approx(0.9 / 2 + 0.1)


def test_an_empty_reply_ends_the_session():
    assert play([""])[0] == []
    outputs, server = play(["2", ""])
    assert len(outputs) == 1
    assert len(server.requests) == 2
    assert outputs[-1].reward_score == pytest.approx(0.9 / 2 + 0.1)


def test_a_first_context_that_is_too_long_is_refused_by_name():
    with pytest.raises(ValueError, match=r"data\.max_prompt_length=20: row 7 of .* a context of \d+ tokens"):
        play(["2"], prompt_length=20, row=ROW | {"index": 7})


def test_notes_that_outgrow_the_prompt_end_the_session_and_none_is_ever_cut():
    row = {
        "data_source": GSM8K_SOURCE,
        "reward_model": {"ground_truth": "42"},
        "raw_prompt": [{"role": "user", "content": "How many?"}],
    }
    note = "six rows of seven, "
    outputs, server = play([note] * 8, prompt_length=380, response_length=40, row=row)
    assert 1 < len(outputs) < 8
    for turn, (_, prompt) in enumerate(server.requests):
        assert "How many?" in prompt
        assert prompt.count(note.strip()) == turn
    assert outputs[-1].reward_score == 0.0
    assert outputs[-1].extra_fields["reward_extra_info"]["answered"] == 0.0


def test_the_data_is_the_same_for_the_same_seed_and_in_verls_form(tmp_path):
    first, val = write_tiny_data(tmp_path / "a", train=40, val=4)
    again, _ = write_tiny_data(tmp_path / "b", train=40, val=4)
    other, _ = write_tiny_data(tmp_path / "c", train=40, val=4, seed=1)
    frame = pd.read_parquet(first)
    assert len(frame) == 40
    assert len(pd.read_parquet(val)) == 4
    assert frame.equals(pd.read_parquet(again))
    assert not frame.equals(pd.read_parquet(other))
    assert {len(row["ground_truth"]) for row in frame["reward_model"]} == set(range(1, 5))
    for row in frame.to_dict("records"):
        letters = row["prompt"][0]["content"]
        assert "".join(str(SYMBOLS.index(letter) + 1) for letter in letters) == row["reward_model"]["ground_truth"]


def test_the_tiny_job_is_a_job_that_verl_and_the_plugin_accept(tmp_path):
    config = compose_job("+local=cpu", *tiny_job(tmp_path), "+padding=prompt")
    assert check_job(config).padding.strategy == "prompt"
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "context_reset"
    assert Path(config.actor_rollout_ref.rollout.agent.agent_loop_config_path).is_file()


def test_the_first_turn_of_a_picture_path_shows_the_picture_and_the_others_text(tmp_path):
    train, _ = write_tiny_data(tmp_path, train=8, val=1, images=True)
    for row in pd.read_parquet(train).to_dict("records"):
        image = {"role": "user", "content": [{"type": "image", **row["images"][0]}]}
        assert row["prompt"][0]["content"] == "<image>"
        task = task_of(row | {"raw_prompt": [image]})
        assert task.messages() == [image]
        path = row["reward_model"]["ground_truth"]
        brightness = Image.open(io.BytesIO(row["images"][0]["bytes"])).getpixel((5, 5))[0]
        assert brightness == {"1": 0, "2": 255}[path[0]]
        task.react(path[0])
        if len(path) > 1:
            assert task.messages() == [{"role": "user", "content": SYMBOLS[int(path[1]) - 1] * 8}]


def test_the_picture_job_is_accepted_too(tmp_path):
    config = compose_job("+local=cpu", *tiny_job(tmp_path, images=True), "+padding=prompt")
    assert check_job(config).padding.strategy == "prompt"
    assert check_job(config).has_vision
