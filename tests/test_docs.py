"""The documentation: the site builds, and what its pages name is there."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from benchmarks.results_page import part_of
from tests.support.pages import DOCS, FENCE, PAGES, ROOT, read, section
from tests.support.trained_rows import MadeRow, trained_rows
from verl_padding.driver import step_metrics
from verl_padding.driver.mixin import PaddedTrainer
from verl_padding.job import metric_names
from verl_padding.job.calls import ACTOR, CRITIC, LOG_PROB, REF, VALUES
from verl_padding.plan import Job, Pass, Rows, Update, plan_batch
from verl_padding.worker.losses import MICRO_BATCHES

NUMBER = re.compile(r"\d[\d,.]*\d|\d")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`(?P<code>[^`]+)`")
FOLDERS = ("verl_padding", "tests", "recipes", "benchmarks", "configs", "docs", ".ci")
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*")
METRIC = re.compile(r'"((?:timing_s/)?padding/[^"]+)"')
UPDATES = (ACTOR, CRITIC)
MODULE = re.compile(r"-m (?P<name>(?:tests|benchmarks|recipes|verl_padding)[\w.]*)")


def named_paths(text: str) -> set[str]:
    """Paths of the repository in code, and the files of modules that are run."""
    found = [*CODE.finditer(FENCE.sub("", text)), *FENCE.finditer(text)]
    code = "\n".join(match["code"] for match in found)
    paths = {path.rstrip(".") for path in PATH.findall(code)}
    return paths | {name.replace(".", "/") + ".py" for name in MODULE.findall(code)}


def generated_parts() -> dict[str, str]:
    """What docs/generate.py would write."""
    return runpy.run_path(str(DOCS / "generate.py"))["parts"]()


def functions_of(path: str) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {
        node.name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, kinds)
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``.ci/run`` builds it."""
    for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", folder / "doctrees"]
    command = [sys.executable, "-m", "sphinx", *options, DOCS, folder / "html"]
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    return folder / "html"


@pytest.mark.docs
def test_the_site_builds_without_a_warning_has_every_page_and_loads_nothing_from_elsewhere(site):
    for page in PAGES[1:]:
        assert (site / page.relative_to(DOCS).with_suffix(".html")).is_file()
    assert "_images/demo.png" in (site / "index.html").read_text()
    loaded = re.compile(
        r"<(?:script|img|link)\b[^>]*\b(?:src|href)=\"(?:https?:)?//", re.IGNORECASE
    )
    assert not [page.name for page in site.rglob("*.html") if loaded.search(page.read_text())]


def test_the_generated_parts_are_what_the_code_makes():
    page = read(DOCS / "reference.md")
    parts = generated_parts()
    assert parts.keys() == {"settings", "commands", "names"}
    for name, text in parts.items():
        assert part_of(page, name) == text, "run python docs/generate.py"


def planned_metrics() -> set[str]:
    """Names of the metrics of a plan that has all calls."""
    shape = {"dp_size": 2, "token_budget": 64}
    keys = [f"p{prompt}_{session}_0" for prompt in range(4) for session in range(2)]
    rows = Rows.from_keys(keys, range(9, 17), zero_advantage=[0])
    update = Update(**shape, prompts_per_mini_batch=2, drops_zero_advantage=True)
    job = Job(
        strategy="prompt",
        prompts=4,
        sessions_per_prompt=2,
        updates=dict.fromkeys(UPDATES, update),
        inference={name: Pass(**shape) for name in (LOG_PROB, REF, VALUES)},
        packer="plan",
        sharing="on",
    )
    return set(step_metrics.plan_metrics(plan_batch(rows, job), rows.tokens_R, 2))


def logged_metrics() -> set[str]:
    """Names of all metrics that the plug-in's functions give for jobs of all calls, and those that
    stand in the code."""
    named = {f"{update}/{MICRO_BATCHES}": 1.0 for update in UPDATES}
    trained = [trained_rows({"p_0_0": MadeRow()})]
    told = planned_metrics().union(
        step_metrics.worker_metrics(named),
        step_metrics.session_metrics(trained),
        step_metrics.advantage_metrics(trained),
        (f"padding/{update}/idle_steps/total" for update in UPDATES),
        (f"padding/{update}/left_out_rows/total" for update in UPDATES),
    )
    modules = [*(ROOT / "verl_padding/driver").glob("*.py"), Path(metric_names.__file__)]
    texts = {text for module in modules for text in METRIC.findall(module.read_text())}
    assert len(texts) >= 20
    told |= {text for text in texts if "{" not in text}
    for text in texts:
        pattern = re.sub(r"\\{.*?\\}", "[a-z_0-9]+", re.escape(text))
        assert any(re.fullmatch(pattern, name) for name in told), f"{text} is not logged here"
    return told


def test_each_metric_has_one_line_and_each_line_a_metric():
    text = section(read(DOCS / "reference.md"), "Metrics")
    entries = re.findall(r"^- ((?:`[^`]+`,?\s)*`[^`]+`): .{10,}", text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^- ", text, re.MULTILINE))
    lines = [name for entry in entries for name in CODE.findall(entry)]
    assert len(lines) == len(set(lines))
    calls = {
        "<update>": "(actor|critic)",
        "<call>": "(actor|critic|log_prob|ref|values)",
        "<role>": "[a-z]+",
    }
    patterns = {
        line: re.sub("<(update|call|role)>", lambda named: calls[named[0]], re.escape(line))
        for line in lines
    }
    of_metric = {
        name: [line for line in lines if re.fullmatch(patterns[line], name)]
        for name in logged_metrics()
    }
    assert {name: found for name, found in of_metric.items() if len(found) != 1} == {}
    assert {line for found in of_metric.values() for line in found} == set(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_and_every_path_of_the_repository_that_a_page_has_leads_somewhere(page):
    for match in LINK.finditer(FENCE.sub("", read(page))):
        target = match["target"].split("#")[0]
        if target and not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), match[0]
    assert [path for path in named_paths(read(page)) if not (ROOT / path).exists()] == []


def test_there_are_fourteen_pages_of_at_most_20_000_words():
    pages = [page for page in PAGES if DOCS in page.parents]
    assert len(pages) == 14
    words = [word for page in pages for word in read(page).split() if re.search(r"\w", word)]
    assert len(words) <= 20_000
    assert len(read(ROOT / "README.md").splitlines()) <= 90


def test_promises_are_in_order_and_the_tests_that_they_name_are_there():
    promises = section(read(DOCS / "evidence.md"), "Promises")
    page = (ROOT / "tests" / "PROMISES.md").read_text()
    titles = re.findall(r"^### (.+)$", promises, flags=re.MULTILINE)
    assert re.findall(r"^## (\d+\. .+)$", page, flags=re.MULTILINE) == titles
    assert [title.split(".")[0] for title in titles] == [str(number) for number in range(1, 25)]
    for part in [section(page, title) for title in titles]:
        proofs = re.findall(r"^- `(tests/[\w/]+\.py)`: (.+)$", part, re.MULTILINE)
        tests = [(path, test) for path, names in proofs for test in CODE.findall(names)]
        assert len(tests) >= 3
        assert [(path, test) for path, test in tests if test not in functions_of(path)] == []


def anchor_of(heading: str) -> str:
    """As GitHub and MyST make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_figures_of_readme_are_those_of_the_evidence():
    page = read(DOCS / "evidence.md")
    sections = {
        anchor_of(heading): section(page, heading)
        for heading in re.findall(r"^##+ (.+)$", page, re.MULTILINE)
    }
    rows = re.findall(
        r"^\| (.+) \|.*\(docs/evidence\.md#([\w-]+)\) \|$", read(ROOT / "README.md"), re.MULTILINE
    )
    assert len(rows) >= 3
    for cells, anchor in rows:
        known = set(NUMBER.findall(sections[anchor]))
        numbers = [number for cell in cells.split(" | ")[1:] for number in NUMBER.findall(cell)]
        assert numbers
        assert [number for number in numbers if number not in known] == [], cells


def test_how_it_works_has_each_method_of_verl_that_is_overridden():
    overridden = {
        name
        for padded in (PaddedTrainer, *PaddedTrainer.__bases__)
        if padded.__module__.startswith("verl_padding.")
        for name in vars(padded)
        if callable(getattr(PPOTrainer, name, None)) and name in vars(PPOTrainer)
    }
    text = section(read(DOCS / "how_it_works.md"), "The trainer")
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    assert {name for cell in cells for name in CODE.findall(cell)} == overridden
    assert len(overridden) > 8
