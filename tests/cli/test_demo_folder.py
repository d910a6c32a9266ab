"""The demo's folder: an earlier demo's files go, and nothing that anyone else has put there is ever deleted."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_padding.cli.demo_folder import LIST, MADE, demo_folder
from verl_padding.errors import PaddingDataError

DEMO_FILES = (
    "assets/tiny_qwen2_seed0/config.json",
    "assets/train.parquet",
    "hydra/.hydra/config.yaml",
    "rollouts/1.jsonl",
    "timing/1.jsonl",
    "metrics.jsonl",
    "log",
    "reward.png",
)


def write(folder: Path, names, text: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def texts(folder: Path) -> dict[str, str]:
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    return {name: text for name, text in found.items() if name != LIST}


def run_once(folder: Path) -> None:
    with demo_folder(folder) as out:
        write(out, DEMO_FILES, "a demo's")


def test_the_files_above_are_of_all_the_places_of_a_demo():
    assert {Path(name).parts[0] for name in DEMO_FILES} == set(MADE)


def test_an_earlier_demo_is_made_anew_and_what_stands_beside_it_stays(tmp_path):
    run_once(tmp_path)
    write(tmp_path, ["thesis.tex", "data/assets/a.png"], "years of work")
    with demo_folder(tmp_path):
        assert texts(tmp_path) == dict.fromkeys(["thesis.tex", "data/assets/a.png"], "years of work")
        assert not (tmp_path / "assets").exists()


@pytest.mark.parametrize("name", ["thesis.tex", ".git/config", "assets/logo.svg", "log"])
def test_a_folder_that_is_not_empty_and_no_demos_is_refused_and_stays_as_it_is(name, tmp_path):
    write(tmp_path, [name], "years of work")
    with pytest.raises(
        PaddingDataError,
        match=rf"--out={tmp_path}: holds {Path(name).parts[0]}, and no demo has run there\. Name a new",
    ):
        run_once(tmp_path)
    assert texts(tmp_path) == {name: "years of work"}
    assert not (tmp_path / LIST).exists()


@pytest.mark.parametrize("name", ["assets/logo.svg", "rollouts/1.jsonl", "hydra/a/b/c", "metrics.jsonl", "log/today"])
def test_a_file_of_the_users_own_in_a_place_of_the_demo_is_refused_and_stays(name, tmp_path):
    with demo_folder(tmp_path):
        pass
    write(tmp_path, [name], "years of work")
    with pytest.raises(PaddingDataError, match=rf"--out={tmp_path}: holds .*{Path(name).parts[0]}.* another folder"):
        run_once(tmp_path)
    assert texts(tmp_path) == {name: "years of work"}


def test_a_file_that_joins_those_of_a_demo_is_refused_and_the_demos_stay_too(tmp_path):
    run_once(tmp_path)
    write(tmp_path, ["rollouts/notes.txt"], "years of work")
    before = texts(tmp_path)
    with pytest.raises(PaddingDataError, match=r"holds rollouts/notes\.txt where"):
        run_once(tmp_path)
    assert texts(tmp_path) == before


def test_the_files_of_a_demo_that_failed_are_made_anew_and_those_of_one_that_was_killed_are_not_known(tmp_path):
    def fail():
        with demo_folder(tmp_path) as out:
            write(out, DEMO_FILES, "a failed demo's")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    run_once(tmp_path)
    before_the_end = (tmp_path / LIST).read_text().replace("rollouts/1.jsonl", "rollouts/0.jsonl")
    (tmp_path / LIST).write_text(before_the_end)
    with pytest.raises(
        PaddingDataError, match=r"holds rollouts/1\.jsonl where the demo puts its own files, and no demo"
    ):
        run_once(tmp_path)


def test_links_are_not_followed_and_empty_folders_of_the_users_own_stay(tmp_path):
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    write(elsewhere, ["1.jsonl"], "years of work")
    with demo_folder(out):
        pass
    for place in ("rollouts", "assets/model"):
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        (out / place).symlink_to(elsewhere)
        with pytest.raises(PaddingDataError, match=place):
            run_once(out)
        (out / place).unlink()
    with pytest.raises(PaddingDataError, match="holds assets/ where"):
        run_once(out)
    assert texts(elsewhere) == {"1.jsonl": "years of work"}


def test_a_list_that_names_more_than_the_demos_places_deletes_nothing_else(tmp_path):
    write(tmp_path, ["out/thesis.tex", "thesis.tex"], "years of work")
    (tmp_path / "out" / LIST).write_text('{"made": ["thesis.tex", "../thesis.tex", "/", "log"]}')
    run_once(tmp_path / "out")
    run_once(tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").read_text() == (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_list_that_is_none_is_refused(tmp_path):
    (tmp_path / LIST).write_text("my own notes")
    with pytest.raises(PaddingDataError, match="not the list of a demo"):
        run_once(tmp_path)
    assert (tmp_path / LIST).read_text() == "my own notes"


def test_a_file_as_the_folder_is_refused_in_one_line(tmp_path):
    (tmp_path / "afile").write_text("years of work")
    for out in (tmp_path / "afile", tmp_path / "afile" / "below", tmp_path / ("long" * 100)):
        with pytest.raises(PaddingDataError, match=r"--out=.*: cannot be made a folder \(.*\)\. Name another\.$"):
            run_once(out)
    assert (tmp_path / "afile").read_text() == "years of work"


names = st.lists(
    st.sampled_from(["assets", "rollouts", "hydra", "log", "a", "1.jsonl", "tiny"]), min_size=1, max_size=4
)


@given(mine=st.lists(names, max_size=4), later=st.lists(names, max_size=3), theirs=st.lists(names, max_size=6))
def test_whatever_is_there_no_file_of_the_users_own_is_deleted_or_changed(tmp_path_factory, mine, later, theirs):
    folder = tmp_path_factory.mktemp("out")

    def put(paths, text):
        for parts in paths:
            path = folder.joinpath(*parts)
            if not os.path.lexists(path) and all(not parent.is_file() for parent in path.parents):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

    def demo():
        try:
            with demo_folder(folder):
                put([parts for parts in theirs if parts[0] in MADE], "a demo's")
        except PaddingDataError:
            return False
        return True

    put(mine, "my own")
    ran = demo()
    assert ran is not any(folder.joinpath(*parts).is_file() for parts in mine)
    put(later, "my own")
    owned = {name: text for name, text in texts(folder).items() if text == "my own"}
    demos = {name: text for name, text in texts(folder).items() if text == "a demo's"}
    in_the_way = any(Path(name).parts[0] in MADE or not ran for name in owned)
    assert demo() is not in_the_way
    assert {name: text for name, text in texts(folder).items() if text == "my own"} == owned
    if in_the_way:
        assert demos.items() <= texts(folder).items()
