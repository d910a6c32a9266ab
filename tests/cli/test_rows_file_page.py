"""The page on file formats has what is read of rows, field by field."""

import json
import re

import numpy as np

from tests.support.pages import DOCS, FENCE, read, section
from verl_padding.cli.batch_reader import read_rows
from verl_padding.on_cpu.tiny_models import make_byte_tokenizer
from verl_padding.plan.row_keys import session_of_key

PAGE = section(read(DOCS / "reference.md"), "File formats")
TEXTS = [block["code"] for block in FENCE.finditer(PAGE) if block["language"] == "text"]


def first_column(heading: str) -> set[str]:
    """What the tables below a heading have in their first column."""
    rows = section(PAGE, heading).split("\n#")[0]
    cells = re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_rows_of_the_page_are_read_as_it_says():
    lengths, dump = (
        read_rows(
            text.encode().splitlines(),
            name="page",
            tokenize=lambda text: list(text.encode()),
        )
        for text in TEXTS[:2]
    )
    assert lengths.tokens_R == (512, 400, 5, 7)
    assert lengths.tries.shared_R.tolist() == [0, 0, 5, 0]
    assert dump.prompt_R == ("7f3a",)
    shown = {key for line in TEXTS[0].splitlines() for key in json.loads(line)}
    assert first_column("A row by its length") == shown
    assert first_column("A row of a rollout dump") == json.loads(TEXTS[1]).keys()


def test_the_pages_converter_writes_a_row_for_each_answer_of_a_trace():
    (code,) = [block["code"] for block in FENCE.finditer(PAGE) if block["language"] == "python"]
    page: dict = {}
    exec(code, page)
    talk = [
        {"role": role, "content": text}
        for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)
    ]
    other = [{"role": "user", "content": "e"}, *talk[1:2]]
    told = [talk, [*talk[:1], {**talk[1], "content": "no"}], other]
    traces = [json.dumps({"messages": messages}) for messages in told]
    lines = [line.encode() for line in page["trace_rows"](traces, make_byte_tokenizer())]
    rows = read_rows(lines, name="page", tokenize=None)
    # The byte template writes <|im_start|>role\ntext<|im_end|>\n: a marker, the role, a newline,
    # the text, a marker.
    message = len("user") + len("assistant") + 2 * (len("\n") * 2 + len("a") + 2)
    assert rows.tokens_R == (message, 2 * message, message + 1, message)
    assert rows.prompt_R[:3] == rows.prompt_R[:1] * 3 != rows.prompt_R[3:] * 3
    assert len(set(map(session_of_key, rows.key_R))) == 3
    assert rows.tries.shared_among(np.array([0, 1]))[1].tolist() == [0, message]
