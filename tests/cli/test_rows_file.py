"""What a file of rows may hold, and how the command names the line that is not a row."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_padding.cli.rows_file import read_batches, read_rows
from verl_padding.errors import PaddingDataError

ROW = {"prompt": "a", "session": 0, "tokens": 5}
PAD = {"uid": "pad_0_0", "input": "", "output": ""}


def lines_of(*rows: dict | str) -> list[bytes]:
    return [(row if isinstance(row, str) else json.dumps(row)).encode() + b"\n" for row in rows]


def read(*rows: dict | str, count_tokens=None, with_idle=False):
    return read_rows(lines_of(*rows), name="rows.jsonl", count_tokens=count_tokens, with_idle=with_idle)


def refusal(*rows: dict | str, count_tokens=None) -> str:
    with pytest.raises(PaddingDataError) as refused:
        read(*rows, count_tokens=count_tokens)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_lengths_may_be_given_in_three_ways():
    batch = read(
        ROW,
        {"prompt": "a", "session": 1, "prompt_tokens": 3, "response_tokens": 0},
        {"prompt": "b", "session": 0, "token_ids": [7, 8]},
    )
    assert batch.rows.tokens_R == (5, 3, 2)
    assert batch.rows.session_R == ("a_0", "a_1", "b_0")
    assert not batch.is_dump


def test_row_numbers_are_lines_from_0_blank_ones_and_pads_of_stock_verl_included():
    row = {"uid": "b_0_0", "input": "hi", "output": "yes", "prompt": "a key that a reward function logs"}
    batch = read(ROW, "", PAD, row, {**ROW, "tokens": 9, "extends": 0}, count_tokens=len)
    assert batch.lines_R == (0, 3, 4)
    assert batch.rows.key_R == ("a_0_0", "b_0_0", "a_0_4")
    assert (batch.pads, batch.is_dump) == (1, True)
    assert batch.rows.extends_R == (None, None, 0)
    assert refusal(ROW, "", {}).startswith("rows.jsonl, line 3 (row number 2): ")


def test_a_byte_order_mark_is_read_and_a_line_separator_inside_a_text_breaks_no_line():
    marked = b"\xef\xbb\xbf" + lines_of(ROW)[0]
    assert len(read_rows([marked], name="rows.jsonl", count_tokens=None).rows) == 1
    text = json.dumps({"uid": "a_0_0", "input": "a\u2028b\x85c", "output": ""}, ensure_ascii=False)
    assert read(text, count_tokens=len).rows.tokens_R == (5,)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ("\udcff", "UnicodeDecodeError"),
        ({"prompt": "a", "session": 0}, "KeyError: 'tokens'"),
        ({"prompt": "a", "tokens": 5}, "KeyError: 'session'"),
        ({"uid": "a_0_1", "input": "2 + 2"}, "KeyError: 'output'"),
        ({"prompt": "a", "session": 0, "prompt_tokens": 4}, "KeyError: 'response_tokens'"),
        ({**ROW, "prompt_tokens": 4, "response_tokens": 2}, r"its lengths differ: \[6, 5\]"),
        ({**ROW, "token_ids": [4, 5]}, r"its lengths differ: \[2, 5\]"),
    ],
)
def test_a_line_that_is_not_a_row_is_refused_with_its_number_and_cause(line, cause):
    text = line if isinstance(line, str) else json.dumps(line)
    lines = [*lines_of(ROW), text.encode(errors="surrogateescape")]
    with pytest.raises(PaddingDataError, match=rf"rows\.jsonl, line 2 \(row number 1\): not a row \(.*{cause}"):
        read_rows(lines, name="rows.jsonl", count_tokens=len)


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({**ROW, "tokens": 0}, "row 'a_0_1' has 0 tokens: a whole number from 1"),
        ({**ROW, "tokens": True}, "row 'a_0_1' has True tokens"),
        ({**ROW, "tokens": 5.5}, "row 'a_0_1' has 5.5 tokens"),
        ({**ROW, "tokens": 10**30}, "a whole number from 1"),
        ({**ROW, "session": "x"}, "row 'a_x_1': not of the form {uid}_{session}_{index}"),
        ({"uid": "abc", "input": "", "output": ""}, "row 'abc': not of the form {uid}_{session}_{index}"),
        ({"uid": "a_0_0", "input": "", "output": ""}, "row 'a_0_0' is in the batch twice"),
    ],
)
def test_rows_that_are_not_a_batch_are_refused_with_their_key(row, cause):
    shown = refusal(ROW, row, count_tokens=len)
    assert shown.startswith("rows.jsonl: ")
    assert cause in shown


@pytest.mark.parametrize("extends", [1, 2, 3, 9, -1, "a"])
def test_a_row_that_extends_no_row_of_its_session_is_refused_with_its_line(extends):
    other = {"prompt": "b", "session": 0, "tokens": 4}
    shown = refusal(ROW, "", PAD, other, {**ROW, "tokens": 9, "extends": extends})
    assert f"rows.jsonl, line 5 (row number 4): extends={extends}, but that is not the number of a row of its" in shown


@pytest.mark.parametrize("ids", [[-1], [True, 2], [1 << 32], [1.5], ["a"], [[1], [2]], "12"])
def test_token_ids_that_are_none_are_refused(ids):
    assert "token ids are whole numbers" in refusal({"prompt": "a", "session": 0, "token_ids": ids})


@pytest.mark.parametrize("name", ["prompt", "session", "tokens", "token_ids", "extends", "shares"])
def test_a_key_that_is_null_is_not_an_absent_one(name):
    others = {"token_ids": [4, 5], "extends": 0, "shares": 1, "prompt_tokens": 2, "response_tokens": 3}
    row = ROW | ({name: others[name]} if name in others else {})
    assert f"{name} is null" in refusal({**row, name: None})


@pytest.mark.parametrize("name", ["uid", "input", "output", "extends"])
def test_a_key_of_a_dump_that_is_null_is_not_an_absent_one(name):
    row = {"uid": "a_0_0", "input": "hi", "output": "yes", "gts": None, "prompt": None}
    assert len(read(row, count_tokens=len).rows) == 1
    assert f"{name} is null" in refusal({**row, name: None}, count_tokens=len)


def test_a_reward_that_is_no_number_is_refused():
    assert "reward=[1] is not a number" in refusal({**ROW, "reward": [1]})
    assert "OverflowError" in refusal({**ROW, "reward": 10**400})


def rewarded(*rewards: float | None, prompt: str = "a", **more) -> list[dict]:
    return [{**ROW, "prompt": prompt, "session": at, "reward": each, **more} for at, each in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "idle"),
    [
        ((1.0, 1.0), (0, 1)),
        ((0.9, 0.9, 0.9), ()),  # verl's mean of the three is 0.9 - 6e-8, and it divides by 6e-8 + 1e-6
        ((0.0, 0.5, 1.0), (1,)),  # the mean is 0.5
        ((0.0,), (0,)),  # verl takes the reward of one session as it is
        ((1.0,), ()),
        ((math.inf, math.inf), ()),
        ((math.nan, math.nan), ()),
        ((1.0, 1.0, None), ()),
        ((None, None), ()),
    ],
)
def test_a_row_is_idle_if_verls_estimator_gives_it_an_advantage_of_exactly_0(rewards, idle):
    assert read(*rewarded(*rewards), with_idle=True).rows.idle == idle
    known = rewarded(*rewards), rewarded(0.0, 1.0, prompt="b")
    assert read(*known[1], *known[0], with_idle=True).rows.idle == tuple(2 + row for row in idle)


reward_lists = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 1 / 3, math.inf, math.nan]), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(rewards_P=st.lists(reward_lists, min_size=1, max_size=4))
def test_idle_rows_of_rewards_are_those_of_verls_grpo_by_itself(rewards_P):
    rows = [row for at, rewards in enumerate(rewards_P) for row in rewarded(*rewards, prompt=f"p{at}")]
    scores = torch.tensor([[row["reward"]] for row in rows])
    uids = np.array([row["prompt"] for row in rows], dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(scores, torch.ones_like(scores), uids)
    found = read(*rows, with_idle=True).rows.idle
    assert set(found) == {row for row, advantage in enumerate(advantages[:, 0]) if advantage == 0}


def test_a_session_earns_what_its_last_row_says_and_all_of_its_rows_are_idle_with_it():
    rows = rewarded(0.5, 0.25)
    more = [{**ROW, "session": 1, "reward": 0.5, "tokens": 9}]
    assert read(*rows, *more, with_idle=True).rows.idle == (0, 1, 2)


def test_of_idle_rows_the_shortest_comes_first_as_the_update_computes_it_where_it_has_no_others():
    rows = [{"prompt": "a", "session": row, "tokens": tokens, "reward": 1} for row, tokens in enumerate([9, 3, 5])]
    assert read(*rows, with_idle=True).rows.idle == (1, 2, 0)


def test_rows_of_text_and_of_token_ids_share_nothing_in_one_prompt_either():
    of_text = [{"uid": f"a_{session}_0", "input": "ab", "output": "c"} for session in (0, 1)]
    of_ids = [{"prompt": "a", "session": session, "token_ids": [1, 2, session]} for session in (2, 3)]
    rows = read(*of_text, *of_ids, count_tokens=len).rows
    forest = rows.shared(trees=True)
    pairs = [(0, 1), (2, 3), (0, 2), (1, 3)]
    shared = forest.shared_by_pairs(*(np.array(numbers) for numbers in zip(*pairs, strict=True)))
    assert shared.tolist() == [3, 2, 0, 0]


def test_of_two_rows_as_long_the_later_one_may_extend_the_earlier_one():
    assert read(ROW, {**ROW, "extends": 0}).rows.extends_R == (None, 0)
    assert "row 'a_0_0' extends row 1 ('a_0_1')" in refusal({**ROW, "extends": 1}, ROW)
    assert "row 'a_0_1' extends row 0 ('a_0_0')" in refusal(ROW, {**ROW, "tokens": 2, "extends": 0})


def test_a_row_extends_the_longest_one_of_its_session_that_it_begins_with_also_where_rows_branch_off():
    ids = [[1, 2], [1], [1, 2, 9], [1, 2, 3, 4], [1, 3], [2], [1, 2, 3], [1, 2, 3]]
    rows = [{"prompt": "a", "session": 0, "token_ids": each} for each in ids]
    texts = [{"uid": f"a_0_{row}", "input": "".join(map(str, each)), "output": ""} for row, each in enumerate(ids)]
    for batch in (read(*rows), read(*texts, count_tokens=len)):
        assert batch.rows.extends_R == (1, None, 0, 7, 1, None, 0, 6)


def test_a_folder_is_read_in_the_order_of_its_steps_and_other_files_are_left_alone(tmp_path):
    for name in ("10.jsonl", "9.jsonl"):
        (tmp_path / name).write_bytes(lines_of(ROW)[0])
    for name in ("metrics.jsonl", "9.json", "notes"):
        (tmp_path / name).write_text("{")
    batches, refused = read_batches(tmp_path, None)
    assert [batch.name for batch in batches] == [f"{tmp_path}/9.jsonl", f"{tmp_path}/10.jsonl"]
    assert refused == []
    (tmp_path / "empty").mkdir()
    with pytest.raises(PaddingDataError, match=r"holds no <step>\.jsonl.*trainer\.rollout_data_dir"):
        read_batches(tmp_path / "empty", None)


def test_torn_empty_and_foreign_files_of_a_folder_are_left_out_with_their_reasons(tmp_path):
    whole = lines_of(ROW)[0]
    texts = {"1": whole, "2": b"\n\n", "3": whole + whole[:9], "4": lines_of(PAD)[0], "5": b"<html>", "6": b""}
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_bytes(text)
    batches, refused = read_batches(tmp_path, len)
    assert [batch.name for batch in batches] == [f"{tmp_path}/1.jsonl"]
    assert [str(each).split(f"{tmp_path}/")[1][:7] for each in refused] == [f"{step}.jsonl" for step in range(2, 7)]
    (tmp_path / "1.jsonl").unlink()
    with pytest.raises(PaddingDataError, match=r"2\.jsonl: holds no row\."):
        read_batches(tmp_path, len)
