"""What a file of rows may hold, and how the command names the line that is not a row."""

import json
import tracemalloc

import numpy as np
import pytest

from verl_padding.cli.batch_reader import read_rows
from verl_padding.errors import PaddingDataError

ROW = {"prompt": "a", "session": 0, "tokens": 5}
PAD = {"uid": "pad_0_0", "input": "", "output": ""}


def lines_of(*rows):
    return [(row if isinstance(row, str) else json.dumps(row)).encode() + b"\n" for row in rows]


def list_of_bytes(text):
    return list(text.encode())


def read(*rows, tokenize=None):
    return read_rows(lines_of(*rows), name="rows.jsonl", tokenize=tokenize)


def refusal(*rows, tokenize=None):
    with pytest.raises(PaddingDataError) as refused:
        read(*rows, tokenize=tokenize)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_blank_lines_and_pads_are_no_rows():
    row = {
        "uid": "b_0_0",
        "input": "hi",
        "output": "yes",
        "prompt": "a key that a reward function logs",
    }
    batch = read(ROW, "", PAD, row, {**ROW, "tokens": 9}, tokenize=list_of_bytes)
    assert batch.key_R == ("a_0_1", "b_0_0", "a_0_5")
    assert refusal(ROW, "", {}).startswith("rows.jsonl, line 3: ")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ({"prompt": "a", "session": 0}, "KeyError: 'tokens'"),
        ({"messages": []}, "KeyError: 'prompt'.* docs/reference"),
    ],
)
def test_a_line_that_is_not_a_row_is_refused_with_its_number_and_cause(line, cause):
    text = line if isinstance(line, str) else json.dumps(line)
    lines = [*lines_of(ROW), text.encode(errors="surrogateescape")]
    with pytest.raises(PaddingDataError, match=rf"rows\.jsonl, line 2: not a row \(.*{cause}"):
        read_rows(lines, name="rows.jsonl", tokenize=list_of_bytes)


def test_rows_that_are_not_a_batch_are_refused_with_their_key():
    shown = refusal(ROW, {"uid": "a_0_1", "input": "", "output": ""}, tokenize=list_of_bytes)
    assert shown.startswith("rows.jsonl: ")
    assert "'a_0_1'" in shown


@pytest.mark.parametrize("ids", [[-1], [True], [[1], [2]], None])
def test_token_ids_that_are_none_are_refused(ids):
    assert "token ids are whole numbers" in refusal({"prompt": "a", "session": 0, "token_ids": ids})


@pytest.mark.parametrize("prompt", [None, True, 1.5, ["a"]])
def test_a_prompt_is_named_by_a_text_or_a_whole_number(prompt):
    assert f"prompt={prompt!r}" in refusal({**ROW, "prompt": prompt})
    assert read({**ROW, "prompt": 7}).prompt_R == ("7",)


def test_numbers_that_fit_no_memory_are_refused():
    for name, value in (("tokens", 10**400), ("token_ids", [10**400])):
        assert "rows.jsonl" in refusal({"prompt": "a", "session": 0, name: value})


def test_rows_without_ids_take_no_memory_for_their_lengths():
    rows = [{"prompt": "a", "session": 0, "token_ids": [1, 2]}] + [{**ROW, "tokens": 1 << 26}] * 20
    tracemalloc.start()
    batch = read(*rows, rows[0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert shared(batch, (0, 21), (0, 1), (1, 2)) == [2, 0, 0]


def shared(batch, *pairs):
    return [batch.tries.shared_among(np.array(pair))[1][1] for pair in pairs]


def test_rows_of_a_prompt_share_by_their_ids_and_a_length_shares_nothing():
    ids = [[1, 2], [1, 2, 9], [1, 2, 3, 4], [2]]
    rows = [{"prompt": "a", "session": row, "token_ids": each} for row, each in enumerate(ids)]
    batch = read(*rows, ROW, {"prompt": "b", "session": 0, "token_ids": [1, 2]})
    assert shared(batch, (0, 1), (1, 2), (0, 2), (0, 3), (0, 4), (0, 5)) == [2, 2, 2, 0, 0, 0]
    assert read(ROW, ROW).tries is None
