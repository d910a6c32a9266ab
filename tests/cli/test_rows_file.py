"""What a file of rows may say, and how the command names the line that it cannot take."""

import json

import pytest

from verl_padding.cli.rows_file import files_of, read_rows, read_rows_file
from verl_padding.errors import PaddingDataError

ROW = {"prompt": "a", "session": 0, "tokens": 5}


def lines_of(*rows: dict | str) -> list[bytes]:
    return [(row if isinstance(row, str) else json.dumps(row)).encode() + b"\n" for row in rows]


def read(*rows: dict | str, count_tokens=None):
    return read_rows(lines_of(*rows), name="rows.jsonl", count_tokens=count_tokens)


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
    assert not batch.counted


def test_row_numbers_are_lines_from_0_blank_ones_and_pads_of_stock_verl_included():
    pad, row = {"uid": "pad_0_0", "input": "", "output": ""}, {"uid": "b_0_0", "input": "hi", "output": "yes"}
    batch = read(ROW, "", pad, row, {**ROW, "tokens": 9, "extends": 0}, count_tokens=len)
    assert batch.lines_R == (0, 3, 4)
    assert batch.pads == 1
    assert batch.rows.extends_R == (None, None, 0)
    assert batch.place(1) == "rows.jsonl, line 4 (row number 3)"
    assert refusal(ROW, "", {}).startswith("rows.jsonl, line 3 (row number 2): ")


def test_a_parquet_file_is_told_as_one():
    with pytest.raises(PaddingDataError, match=r"line 1 \(row number 0\): a parquet file, but rows are read from text"):
        read_rows([b"PAR1\x15\x04\xff\n"], name="rows.parquet", count_tokens=None)


def test_a_byte_order_mark_is_taken_and_a_line_separator_inside_a_text_breaks_no_line():
    marked = b"\xef\xbb\xbf" + lines_of(ROW)[0]
    assert len(read_rows([marked], name="rows.jsonl", count_tokens=None).rows) == 1
    text = json.dumps({"uid": "a_0_0", "input": "a\u2028b\x85c", "output": ""}, ensure_ascii=False)
    assert read(text, count_tokens=len).rows.tokens_R == (5,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ": not JSON"),
        ("[" * 100_000, ": not JSON"),
        ('{"tokens": 1' + "0" * 5000 + "}", ": not JSON"),
        ("[1]", ": not an object but list"),
        ({**ROW, "prompt": 3}, ": prompt=3, but a string is needed"),
        ({**ROW, "session": "x"}, ': session="x", but a whole number from 0 to'),
        ({**ROW, "tokens": 0}, ": tokens=0, but a whole number from 1 to"),
        ({**ROW, "tokens": True}, ": tokens=true, but a whole number"),
        ({**ROW, "tokens": None}, ": tokens=null, but a whole number"),
        ({**ROW, "tokens": 10**30}, "0, but a whole number from 1 to 67108864 is needed"),
        ({"prompt": "a", "session": 0}, ": no 'tokens'. It is needed: a row is {\"prompt\""),
        ({"prompt": "a", "tokens": 5}, ": no 'session'. It is needed"),
        ({"session": 0, "tokens": 5}, ": no 'prompt'. It is needed"),
        (
            {"prompt": "a", "session": 0, "prompt_tokens": 4, "response_tokens": 2, "tokens": 7},
            ": by prompt_tokens and response_tokens 6, but by tokens 7 tokens. Correct the line",
        ),
        ({"prompt": "a", "session": 0, "token_ids": [4, 5], "tokens": 3}, ": by token_ids 2, but by tokens 3 tokens."),
        ({"prompt": "a", "session": 0, "prompt_tokens": 4}, ": no 'response_tokens'. It is needed"),
        ({"prompt": "a", "session": 0, "prompt_tokens": 0, "response_tokens": 4}, ": prompt_tokens=0, but a whole"),
        ({"prompt": "a", "session": 0, "prompt_tokens": 2**26, "response_tokens": 1}, ": 67108865 tokens, but at most"),
        ({"prompt": "a", "session": 0, "token_ids": []}, ": token_ids=[], but a list of whole numbers"),
        ({"prompt": "a", "session": 0, "token_ids": [1, True]}, ": token_ids=[1, true], but a list"),
        ({"uid": "abc", "input": "", "output": ""}, ': uid="abc", but the form {uid}_{session}_{index} is needed'),
        ({"uid": "a_0_1", "output": ""}, ": no 'input'. It is needed"),
        ({"uid": "a_0_0", "input": "", "output": ""}, ": the row 'a_0_0' is in line 1 (row number 0) too. A batch has"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_what_is_wrong(line, message):
    assert f"rows.jsonl, line 2 (row number 1){message}" in refusal(ROW, line, count_tokens=len) or (
        message.startswith("0,") and message in refusal(ROW, line)
    )


def test_a_line_that_is_not_utf_8_is_refused_with_its_number():
    with pytest.raises(PaddingDataError, match=r"line 2 \(row number 1\): not UTF-8 .* Store the file as UTF-8"):
        read_rows([*lines_of(ROW), b'{"prompt": "\xff"}\n'], name="rows.jsonl", count_tokens=None)
    with pytest.raises(PaddingDataError, match=r"line 1 \(row number 0\): not UTF-8"):
        read_rows(["\ufeff{}\n".encode("utf-16")], name="rows.jsonl", count_tokens=None)


def test_a_dump_without_a_tokenizer_is_refused_with_the_option():
    dumped = {"uid": "a_0_0", "input": "", "output": ""}
    assert "a rollout dump holds text and no lengths. Name the model's tokenizer with --tokenizer" in refusal(dumped)
    # A reward function may log a key of that name.
    assert read({**dumped, "prompt": "2 + 2"}, count_tokens=len).rows.key_R == ("a_0_0",)


FIRST = {"prompt": "a", "session": 0, "token_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"tokens": 9, "extends": 9}, "extends=9, but the last line is line 6 (row number 5)"),
        ({"tokens": 9, "extends": 1}, "extends=1, but line 2 (row number 1) is blank"),
        ({"tokens": 9, "extends": 2}, "extends=2, but line 3 (row number 2) is a pad of stock verl"),
        ({"tokens": 9, "extends": 5}, "extends=5, but line 6 (row number 5) is this row itself"),
        ({"tokens": 2, "extends": 0}, "extends=0, but line 1 (row number 0) has 3 tokens, more than the 2 of this row"),
        ({"tokens": 9, "extends": 4}, "extends=4, but line 5 (row number 4) is of session 'b_0', and this row of sess"),
        ({"token_ids": [1, 2, 4, 5], "extends": 0}, "extends=0, but this row does not begin with what line 1 (row num"),
        ({"tokens": 9, "extends": "a"}, 'extends="a", but a whole number'),
        ({"tokens": 9, "extends": -1}, "extends=-1, but a whole number"),
    ],
)
def test_each_reason_why_a_row_cannot_extend_another_has_a_sentence(row, cause):
    pad = {"uid": "pad_0_0", "input": "", "output": ""}
    other = {"prompt": "b", "session": 0, "tokens": 4}
    told = refusal(FIRST, "", pad, {**ROW, "session": 1}, other, {"prompt": "a", "session": 0, **row})
    assert f"rows.jsonl, line 6 (row number 5): {cause}" in told


def test_of_two_rows_as_long_the_later_one_may_extend_the_earlier_one():
    assert read(ROW, {**ROW, "extends": 0}).rows.extends_R == (None, 0)
    assert "extends=1, but line 2 (row number 1) has 5 tokens as this row has, and comes after it" in refusal(
        {**ROW, "extends": 1}, ROW
    )


def test_a_row_extends_the_longest_one_of_its_session_that_it_begins_with_also_where_rows_branch_off():
    ids = [[1, 2], [1], [1, 2, 9], [1, 2, 3, 4], [1, 3], [2], [1, 2, 3], [1, 2, 3]]
    rows = [{"prompt": "a", "session": 0, "token_ids": each} for each in ids]
    assert read(*rows).rows.extends_R == (1, None, 0, 7, 1, None, 0, 6)


def test_a_folder_is_read_in_the_order_of_its_steps_and_other_files_are_left_alone(tmp_path):
    for name in ("10.jsonl", "9.jsonl", "metrics.jsonl", "9.json", "notes"):
        (tmp_path / name).write_text("{")
    assert [file.name for file in files_of(tmp_path)] == ["9.jsonl", "10.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(PaddingDataError, match=r"holds no <step>\.jsonl.*trainer\.rollout_data_dir"):
        files_of(tmp_path / "empty")


def test_what_cannot_be_read_is_refused_with_what_can(tmp_path):
    (tmp_path / "file").write_text("{}")
    for path in (tmp_path / "none.jsonl", tmp_path / "file" / "below", tmp_path / ("long" * 100)):
        with pytest.raises(
            PaddingDataError, match=r"cannot be read \(.*\)\. Name a file of rows.*- for standard input"
        ):
            read_rows_file(files_of(path)[0], None)
    (tmp_path / "file").write_text("\n\n")
    with pytest.raises(PaddingDataError, match=r"file: holds no row\. One JSON object per line is needed: a row is"):
        read_rows_file(tmp_path / "file", None)
