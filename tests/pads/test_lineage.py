"""Which rows of a batch in the real TransferQueue extend each other, against a comparison of every pair."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import transfer_queue as tq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.branching_rows import branching_rows
from tests.support.rows_in_queue import PARTITION
from tests.support.sessions_that_grow import grown_sessions, put_grown_sessions
from verl_padding.errors import PaddingDataError
from verl_padding.pads import lineage
from verl_padding.pads.lineage import find_extensions, find_forest
from verl_padding.plan import Rows
from verl_padding.plan.row_keys import session_of_key, uid_of_key

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def found(rows, images: bool = False, outputs: bool = True, **fields) -> list[int | None]:
    batch = put_grown_sessions(rows, **fields)
    tokens_R = [tag["seq_len"] for tag in batch.tags]
    extends_R = find_extensions(batch, tokens_R, images=images, outputs=outputs)
    Rows.from_keys(batch.keys, tokens_R, extends_R)  # the plan takes it
    tq.kv_clear(keys=batch.keys, partition_id=PARTITION)
    return extends_R


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.integers(1, 5), min_size=1, max_size=5), seed=st.integers(0, 99), draw=st.randoms())
def test_the_turns_of_a_session_extend_each_other_in_any_order(turns, seed, draw):
    rows = grown_sessions(turns, prompts=2, seed=seed)
    keys = list(rows)
    draw.shuffle(keys)
    extends_R = found({key: rows[key] for key in keys})
    for row, (key, earlier) in enumerate(zip(keys, extends_R, strict=True)):
        whole = [rows[other][0] + rows[other][1] for other in keys]
        begins = [
            other
            for other in range(len(keys))
            if other != row
            and session_of_key(keys[other]) == session_of_key(key)
            and whole[row][: len(whole[other])] == whole[other]
        ]
        longest = max(begins, key=lambda other: len(whole[other]), default=None)
        assert earlier == longest


def test_a_large_batch_is_read_in_parts_with_the_same_result(monkeypatch):
    rows = grown_sessions([4, 3, 1, 5, 2, 4], prompts=3)
    want = found(rows)
    monkeypatch.setattr(lineage, "TOKENS_AT_ONCE", 40)
    monkeypatch.setattr(lineage, "LARGE_AT_ONCE", 1)
    assert found(rows) == want
    assert sum(earlier is not None for earlier in want) == 13


@pytest.mark.parametrize("at_once", [(1 << 22, 1 << 16), (40, 1)], ids=["at once", "in parts"])
@pytest.mark.parametrize("routed", [False, True])
def test_rows_of_a_prompt_share_up_to_where_their_tokens_or_routes_part(routed, at_once, monkeypatch):
    monkeypatch.setattr(lineage, "TOKENS_AT_ONCE", at_once[0])
    monkeypatch.setattr(lineage, "LARGE_AT_ONCE", at_once[1])
    rows = branching_rows(prompts=3, rollouts=3)
    ids = [prompt + response for prompt, response in rows.values()]
    draw = torch.Generator().manual_seed(0)
    # Routes that part at random places, mostly late.
    routes = [(torch.rand(len(row), 2, 1, generator=draw) < 0.05).to(torch.int64) for row in ids]
    batch = put_grown_sessions(rows, **({"routed_experts": routes} if routed else {}))
    forest = find_forest(batch, [tag["seq_len"] for tag in batch.tags])
    order = np.argsort(forest.place_R)
    for before, row in pairwise(order):
        want = 0
        if uid_of_key(batch.keys[before]) == uid_of_key(batch.keys[row]):
            lines = [
                list(zip(ids[each], routes[each].tolist() if routed else ids[each], strict=True))
                for each in (before, row)
            ]
            want = next((n for n, (a, b) in enumerate(zip(*lines, strict=False)) if a != b), min(map(len, lines)))
        assert forest.shared_R[row] == want
    assert forest.shared_R[order[0]] == 0
    assert forest.shared_R.sum() > (30 if routed else 100)


def test_a_batch_of_one_row_sessions_is_not_read(monkeypatch):
    monkeypatch.setattr(lineage, "read_fields", lambda *_: pytest.fail("rows were read"))
    assert found(grown_sessions([1, 1, 1], prompts=2)) == [None] * 3


def test_equal_rows_of_two_sessions_are_not_compared():
    rows = {f"p0_{session}_{turn}": ([1, 2], [3, *range(turn)]) for session in (2, 10) for turn in range(2)}
    assert found(rows) == [None, 0, None, 2]


def declared(rows, extends: dict[str, object]) -> list[int | None]:
    extra = [{"min_global_steps": 1} | ({"extends": extends[key]} if key in extends else {}) for key in rows]
    return found(rows, extra_fields=extra)


def test_what_an_agent_loop_declares_is_believed_and_no_token_is_read(monkeypatch):
    rows = grown_sessions([3, 1, 2], prompts=2)
    assert list(rows) == ["p0_0_0", "p0_0_1", "p0_0_2", "p1_0_0", "p0_1_0", "p0_1_1"]
    monkeypatch.setattr(lineage, "extensions", lambda *_: pytest.fail("tokens were read"))
    extends = {"p0_0_1": 0, "p0_0_2": 0, "p0_1_1": 0}
    assert declared(rows, extends) == [None, 0, 0, None, None, 4]


@pytest.mark.parametrize(
    ("extends", "left_out", "expected"),
    [
        pytest.param({"p0_0_2": 1}, [], [None, None, 1, None, 3], id="another session is searched"),
        pytest.param({"p0_0_1": np.int64(0), "p0_1_1": None}, [], [None, 0, None, None, None], id="silent rows, None"),
        pytest.param({"p0_0_1": 0, "p0_0_2": 1}, ["p0_0_0"], [None, 0, None, 2], id="a named row was left out"),
    ],
)
def test_a_row_that_declares_nothing_extends_none_if_its_session_does(extends, left_out, expected):
    rows = grown_sessions([3, 2], prompts=1)
    for key in left_out:
        del rows[key]
    assert declared(rows, extends) == expected


@pytest.mark.parametrize("place", [0, 1])
def test_a_row_no_longer_than_the_one_it_names_extends_none_with_a_warning(place, caplog):
    rows = {"p0_0_0": ([1, 2, 3], [4]), "p0_0_1": ([1, 2], [3])}
    assert declared(rows, {f"p0_0_{1}": place}) == [None, None]
    assert "of rows p0_0_1 (1 in all) names a row of the session that has more tokens" in caplog.text


def test_rows_with_something_else_in_their_extra_fields_are_searched():
    assert found(grown_sessions([2], prompts=1), extra_fields=[None, "a word of the user's own"]) == [None, 0]


def test_nothing_is_believed_where_rows_have_more_than_tokens():
    rows, extra = grown_sessions([2], prompts=1), [{}, {"extends": 0}]
    routes = [torch.full((len(a) + len(b), 1, 1), turn) for turn, (a, b) in enumerate(rows.values())]
    assert found(rows, extra_fields=extra, routed_experts=routes) == [None, None]
    assert found(rows, extra_fields=extra, routed_experts=routes, outputs=False) == [None, 0]
    images = [{"pixel_values": torch.full((1, 2), float(turn))} for turn in range(2)]
    for outputs in (True, False):
        assert found(rows, True, outputs, extra_fields=extra, multi_modal_inputs=images) == [None, None]


def test_nothing_is_believed_where_nobody_compares_the_rows_again():
    rows, extra = {"p0_0_0": ([1, 2], [3]), "p0_0_1": ([4, 5], [6, 7])}, [{}, {"extends": 0}]
    assert found(rows, extra_fields=extra) == [None, 0]
    assert found(rows, extra_fields=extra, outputs=False) == [None, None]


def test_images_are_read_of_few_sessions_at_a_time(monkeypatch):
    rows = grown_sessions([3, 1, 2, 4], prompts=2) | {"p0_9_0": ([1], [2]), "p0_9_1": ([3], [4])}
    read, seen = lineage.read_fields, []

    def counted_read(keys, partition_id, names):
        seen.append((len(keys), "multi_modal_inputs" in names))
        return read(keys, partition_id, names)

    monkeypatch.setattr(lineage, "read_fields", counted_read)
    monkeypatch.setattr(lineage, "LARGE_AT_ONCE", 1)
    extends_R = found(rows, images=True, multi_modal_inputs=[{"pixel_values": torch.ones(2, 4)} for _ in rows])
    assert sum(earlier is not None for earlier in extends_R) == 6
    assert seen == [(11, False), (3, True), (2, True), (4, True)]


@pytest.mark.parametrize("place", ["0", -1, True, 1.0])
def test_what_cannot_be_is_refused_with_the_row(place):
    with pytest.raises(PaddingDataError, match=r"row 'p0_0_1': extra_fields\['extends'\] is .*number of a row of its"):
        declared(grown_sessions([2], prompts=1), {"p0_0_1": place})
