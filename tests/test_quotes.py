"""What the pages quote of the benchmarks is what the kept files say."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.quotes import BENCHMARKS, Quote, quotes
from benchmarks.results import VERSIONS, kept, kept_file
from tests.support.pages import FENCE, PAGES, ROOT

MODULE = re.compile(r"python -m benchmarks\.(\w+)")
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?: %| ms\b| s\b)|(?<![\w.])\d+\.\d+(?![\w.]*\d)")
TELLING = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if re.search(r"^ +tell\(", path.read_text(), re.M)}
QUOTING = [*PAGES, ROOT / "CHANGELOG.md"]


def test_the_figures_of_every_benchmark_that_is_quoted_are_kept():
    assert set(BENCHMARKS) <= TELLING
    for benchmark, function in BENCHMARKS.items():
        assert list(function(kept(benchmark))), benchmark
    named = {name for page in QUOTING for name in MODULE.findall(page.read_text())}
    assert named - {"quotes"} <= TELLING


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_kept_file_says_what_it_was_measured_on(benchmark):
    told = json.loads(kept_file(benchmark).read_text())
    assert told["benchmark"] == benchmark
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", told["measured"])
    assert {"processor", "cores", "memory_gib", "system", "python"} <= told["machine"].keys()
    assert all(told["versions"][name] for name in VERSIONS)
    timed = "busy_cores()" in (ROOT / "benchmarks" / f"{benchmark}.py").read_text()
    assert ("cores_busy_with_other_work" in told["machine"]) == timed


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_pages_say_what_was_measured(benchmark):
    differences = {
        quote.page: found
        for name, quote in quotes()
        if name == benchmark and (found := quote.differences((ROOT / quote.page).read_text()))
    }
    assert differences == {}, "python -m benchmarks.quotes --write puts the kept figures into the pages"


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_where_a_page_names_a_benchmark_all_its_figures_are_quotes(page: Path):
    text = page.read_text()
    for _, quote in quotes():
        if ROOT / quote.page == page:
            place = quote.found(text)
            text = text[: place.start()] + "\n" * text[place.start() : place.end()].count("\n") + text[place.end() :]
    blocks = [block for block in FENCE.sub("", text).split("\n\n") if block.strip()]
    for block, after in zip(blocks, [*blocks, ""][1:], strict=True):
        if MODULE.search(block):
            told = block + ("\n" + after if after.startswith("|") else "")
            assert FIGURE.findall(told) == [], told


def test_a_figure_that_no_quote_covers_is_seen():
    # Known to be able to fail.
    assert FIGURE.findall("takes 0.13 s, or 12 % of 1.25 x 4 ms") == ["0.13 s", "12 %", "1.25", "4 ms"]
    assert FIGURE.findall("verl 0.9.1, 61 of 120 rows, `p0.5`, 2 cores") == []


def test_a_quote_finds_its_figures_in_a_page_and_mends_them():
    page = "| a | 1.20 |\n\nIt takes 0.5 s, and\n12.5 % of what (1 to 3) was.\n"
    quote = Quote("page", "It takes {seconds} s, and {share} of what ({least} to {most})", {"seconds": "0.25"})
    assert quote.differences(page) == {"seconds": ("0.5", "0.25")}
    mended = quote.written(page)
    assert mended == page.replace("0.5 s", "0.25 s")
    assert quote.differences(mended) == {}
    assert Quote("page", "| a | {value} |", {"value": "12.5 %"}).written(page).startswith("| a | 12.5 % |\n")
    with pytest.raises(ValueError, match="0 times, and not once"):
        Quote("page", "It took {seconds} s").found(page)
    with pytest.raises(ValueError, match="2 times, and not once"):
        quote.found(page + page)
