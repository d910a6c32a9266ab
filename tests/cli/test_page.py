"""The page: what its bars and lines are computed from."""

import re
from dataclasses import fields, replace
from importlib.resources import files

from tests.record.test_step_file import ROW, made_step
from verl_padding.cli.page import Bar, bars_of_call
from verl_padding.record.step_file import Place, RecordedRow


def test_columns_that_the_page_names_are_those_of_a_recorded_row():
    script = (files("verl_padding.cli") / "report_page/page.js").read_text()
    headings = re.findall(r"(\w+): \"", re.search(r"HEADINGS = \{(.*?)\}", script, re.S)[1])
    assert "advantage" in headings
    compared = re.findall(r"column === \"(\w+)\"", script)
    assert {*headings, *compared} <= {each.name for each in fields(RecordedRow)}


def test_a_micro_batch_begins_when_all_ranks_are_ready_with_the_one_before():
    tokens = {(0, 0, 0): 3, (0, 1, 0): 2, (0, 0, 1): 1, (0, 1, 1): 4, (1, 0, 0): 5, (1, 1, 0): 5}
    rows = [
        replace(ROW, row=row, tokens=each, places={"actor": Place(*place)})
        for row, (place, each) in enumerate(tokens.items())
    ]
    bars = bars_of_call(made_step(rows), "actor")
    assert [(bar.start, bar.tokens, bar.length) for bar in bars] == [
        (0, 3, 3), (0, 2, 3), (3, 1, 4), (3, 4, 4), (7, 5, 5), (7, 5, 5),
    ]  # fmt: skip
    uncut = replace(ROW, places={"actor": Place(0, 1, None)})
    assert bars_of_call(made_step([uncut]), "actor") == [Bar(1, 0, None, 0, 12, 12, [0])]
