"""The page on rows files and the JSON of a plan has what is read and printed, field by field."""

import json
import re
from dataclasses import fields

from tests.cli.test_plan import SHARED, plan_of
from tests.support.pages import DOCS, FENCE, read
from verl_padding.cli.batch_reader import read_rows
from verl_padding.plan import LayoutFigures

PAGE = read(DOCS / "rows_file.md")
TEXTS = [block["code"] for block in FENCE.finditer(PAGE) if block["language"] == "text"]
SHAPE = ("--dp", 2, "--mini-batch", 1, "--n", 2, "--budget", 1024)


def first_column(heading: str) -> set[str]:
    """What the tables below a heading have in their first column."""
    section = PAGE.split(f"# {heading}\n")[1].split("\n#")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_rows_of_the_page_are_read_as_it_says():
    lengths, dump = (
        read_rows(text.encode().splitlines(), name="page", tokenize=list) for text in TEXTS[:2]
    )
    assert lengths.rows.tokens_R == (512, 400, 900, 5, 7)
    assert dump.rows.prompt_R == ("7f3a",)
    shown = {key for line in TEXTS[0].splitlines() for key in json.loads(line)}
    assert first_column("A row by its length") == shown
    assert first_column("A row of a rollout dump") == json.loads(TEXTS[1]).keys()


def test_the_json_has_the_keys_and_figures_of_the_page(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(TEXTS[0])
    shown = plan_of("--compare", path, *SHAPE, *SHARED)
    assert shown.keys() == first_column("The plan as JSON") == json.loads(TEXTS[2]).keys()
    assert (
        shown["figures"].keys()
        == first_column("Figures")
        == {field.name for field in fields(LayoutFigures)} | {"plan_seconds"}
    )
    for name, totals in shown["comparison"].items():
        assert totals.keys() == first_column("Comparison")
        assert f"`{name}`" in PAGE.split("### Comparison\n")[1]
    nulls = {name for name, figure in plan_of(path, *SHAPE)["figures"].items() if figure is None}
    (sentence,) = re.findall(r"^(.*) are null with `packer=verl`", PAGE, re.MULTILINE)
    assert nulls == set(re.findall(r"`(\w+)`", sentence))


def test_a_folder_has_the_keys_of_the_page(tmp_path):
    (tmp_path / "1.jsonl").write_text(TEXTS[0])
    shown = plan_of(tmp_path, *SHAPE, "--compare")
    (form,) = re.findall(r"the output is\s`(\{.*?\})`", PAGE)
    assert list(shown) == re.findall(r'"(\w+)"', form)
    assert shown["batches"][0].keys() == first_column("The plan as JSON") - {
        "strategy",
        "packer",
        "sharing",
    }
