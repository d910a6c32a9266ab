"""The file of a step, written and read again."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from verl_padding.errors import PaddingDataError
from verl_padding.record.step_file import Place, RecordedRow, RecordedStep, read_steps, write_steps

ROW = RecordedRow(
    row=0,
    key="a_0_0",
    tokens=12,
    trained_tokens=4,
    reward=1.0,
    advantage=0.5,
    zero_advantage=False,
    weight=1.0,
    shared_tokens=12,
    shares_with=1,
    staleness=0,
    places={"actor": Place(0, 1, 2), "log_prob": Place(0, 1, None)},
)
"""Extended by the row below: that one begins with all of its tokens."""
LONGER = replace(
    ROW,
    row=1,
    key="a_0_1",
    tokens=20,
    trained_tokens=0,
    advantage=None,
    zero_advantage=True,
    shared_tokens=0,
    shares_with=None,
)
PARTED = replace(
    ROW,
    row=2,
    key="a_1_0",
    tokens=15,
    reward=0.25,
    shared_tokens=7,
    shares_with=0,
    places={"actor": Place(0, 0, 1)},
)
ALONE = replace(
    LONGER,
    row=3,
    key="b_0_0",
    reward=0.0,
    staleness=None,
    zero_advantage=False,
    advantage=0.0,
    trained_tokens=1,
)


ROWS = [ROW, LONGER, PARTED, ALONE]


def made_step(rows=ROWS, **values) -> RecordedStep:
    given = {"step": 3, "update": 0, "keys": tuple(row.key for row in rows or ROWS), "rows": rows}
    return RecordedStep(**given | values)


def test_a_file_reads_as_it_was_written(tmp_path):
    updates = [made_step(), made_step(update=1)]
    path = tmp_path / "steps" / "3.jsonl"
    write_steps(updates, path)
    assert read_steps(path) == updates


def test_a_line_of_a_row_has_this_form(tmp_path):
    write_steps([made_step()], tmp_path / "3.jsonl")
    header, row, *_ = map(json.loads, (tmp_path / "3.jsonl").read_text().splitlines())
    assert header == {
        "form": 4,
        "step": 3,
        "update": 0,
        "keys": ["a_0_0", "a_0_1", "a_1_0", "b_0_0"],
    }
    assert row == {
        "row": 0,
        "key": "a_0_0",
        "tokens": 12,
        "trained_tokens": 4,
        "reward": 1.0,
        "advantage": 0.5,
        "zero_advantage": False,
        "weight": 1.0,
        "shared_tokens": 12,
        "shares_with": 1,
        "staleness": 0,
        "places": {"actor": [0, 1, 2], "log_prob": [0, 1, None]},
    }


def test_numbers_that_are_not_finite_are_null_in_the_file(tmp_path):
    path = tmp_path / "3.jsonl"
    unknown = replace(ROW, reward=math.nan, advantage=-math.inf, shares_with=None)
    write_steps([made_step([unknown])], path)
    row = json.loads(path.read_text().splitlines()[1])
    assert (row["reward"], row["advantage"], row["weight"]) == (None, None, 1.0)
    (read,) = read_steps(path)[0].rows
    assert (read.reward, read.advantage) == (None, None)
    assert list(tmp_path.iterdir()) == [path]
    path.unlink()
    with pytest.raises(TypeError):
        write_steps([made_step(), made_step(step=object())], path)
    assert not path.exists()


def test_what_rows_share_makes_tries_again():
    tries = made_step().tries()
    order, shared = tries.shared_among(np.array([0, 2, 1]))
    assert order.tolist() == [2, 0, 1], (
        "row 1, then row 0, which it begins with, then row 2, which branches off that"
    )
    assert shared.tolist() == [0, 12, 7]
    assert sorted(tries.dfs_position_R.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"form": 4, "step": 1, "update": 0, "keys": []}\n{"call": "actor"}\n',
        '{"form": 4, "step": 1, "update": 0, "keys": ["a_0_0"]}\n{"row": 0}\n',
        '{"call": "actor"}\n',
        "[" * 100_000 + "\n",
    ],
)
def test_a_file_that_holds_no_step_is_refused(text, tmp_path):
    path = tmp_path / "3.jsonl"
    path.write_text(text)
    with pytest.raises(
        PaddingDataError, match=r"3\.jsonl[:,] .*Name one that padding.record=true has written"
    ):
        read_steps(path)


@pytest.mark.parametrize(
    "header", ['{"step": 1, "keys": []}', '{"form": 3, "step": 1, "keys": [], "new": 1}']
)
def test_a_file_of_another_form_is_refused(header, tmp_path):
    path = tmp_path / "3.jsonl"
    path.write_text(header + "\n")
    with pytest.raises(PaddingDataError, match=r"in form 4 .*form .*input_value=(None|3)"):
        read_steps(path)
