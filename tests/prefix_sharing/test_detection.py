"""How far the rows of a batch in the real TransferQueue begin alike, against a comparison of every
pair."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import transfer_queue as tq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.branching_rows import branching_rows
from tests.support.rows_in_queue import PARTITION
from tests.support.sessions_that_grow import grown_sessions, put_grown_sessions
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.errors import PaddingDataError
from verl_padding.pads.upsampling import strip
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import index_of_key, session_of_key, uid_of_key
from verl_padding.prefix_sharing import detection
from verl_padding.prefix_sharing.detection import PrefixDetection, parent_rows

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]


def detect(rows, *, images=False, **fields):
    batch = put_grown_sessions(rows, **fields)
    return PrefixDetection(batch, may_have_images=images)


def continued(rows, **fields):
    found = detect(rows, **fields).parent_R
    tq.kv_clear(keys=list(rows), partition_id=PARTITION)
    return found


@pytest.mark.parametrize("at_once", [(1 << 22, 1 << 16), (40, 1)], ids=["at once", "in parts"])
@pytest.mark.parametrize("routed", [False, True])
def test_rows_of_a_prompt_share_up_to_where_tokens_or_routes_branch(routed, at_once, monkeypatch):
    monkeypatch.setattr(detection, "MAX_TOKENS_READ", at_once[0])
    monkeypatch.setattr(detection, "MAX_LARGE_TOKENS_READ", at_once[1])
    rows = branching_rows(prompts=3, rollouts=3)
    ids = [prompt + response for prompt, response in rows.values()]
    draw = torch.Generator().manual_seed(0)
    # Routes that begin to differ at random places, mostly late.
    routes = [(torch.rand(len(row), 2, 1, generator=draw) < 0.05).to(torch.int64) for row in ids]
    prefixes = detect(rows, **({"routed_experts": routes} if routed else {}))
    keys, tries = list(rows), prefixes.by_outputs
    order = np.argsort(tries.dfs_position_R)
    for before, row in pairwise(order):
        want = 0
        if uid_of_key(keys[before]) == uid_of_key(keys[row]):
            lines = [
                list(zip(ids[each], routes[each].tolist() if routed else ids[each], strict=True))
                for each in (before, row)
            ]
            want = next(
                (n for n, (a, b) in enumerate(zip(*lines, strict=False)) if a != b),
                min(map(len, lines)),
            )
        assert tries.shared_R[row] == want
    assert tries.shared_R[order[0]] == 0
    assert tries.shared_R.sum() > (30 if routed else 100)
    assert (prefixes.by_tokens.shared_R >= tries.shared_R).all()


def test_a_batch_of_one_row_sessions_continues_nothing_unread(monkeypatch):
    monkeypatch.setattr(detection, "read_fields", lambda *_: pytest.fail("rows were read"))
    assert continued(grown_sessions([1, 1, 1], prompts=2)) == [None] * 3


def declared(rows, extends):
    extra = [
        {"min_global_steps": 1} | ({"extends": extends[key]} if key in extends else {})
        for key in rows
    ]
    return continued(rows, extra_fields=extra)


def test_a_row_continues_the_one_that_its_agent_loop_names_or_none(caplog):
    rows = grown_sessions([4, 2], prompts=1)
    del rows["p0_0_1"]  # as a filter leaves it out
    extends = {"p0_0_2": np.int64(0), "p0_0_3": 1, "p0_1_0": None}
    assert list(rows) == ["p0_0_0", "p0_0_2", "p0_0_3", "p0_1_0", "p0_1_1"]
    assert declared(rows, extends) == [None, 0, None, None, None]
    assert "extends" not in caplog.text
    rows = {"p0_0_0": ([1, 2], [3]), "p0_0_1": ([4, 5], [6, 7])}
    assert declared(rows, {"p0_0_1": 0}) == [None, None]
    assert "of rows p0_0_1 (1 in all)" in caplog.text


@st.composite
def sessions_in_any_order(draw):
    """Keys and tokens of the rows of two sessions, of few tokens, so that many begin alike, and
    what some are said to extend."""
    keys = [f"a_{n}_{index}" for n in (0, 1) for index in range(draw(st.integers(1, 5)))]
    keys = draw(st.permutations(keys))
    tokens = [[1, *draw(st.lists(st.integers(1, 2), max_size=4))] for _ in keys]
    declared = {}
    for row, key in enumerate(keys):
        if key.startswith("a_0") and draw(st.booleans()):
            mates = [other for other, each in enumerate(keys) if each.startswith("a_0")]
            declared[row] = draw(st.sampled_from([None, *mates]))
    return keys, tokens, declared


@settings(max_examples=150)
@given(session=sessions_in_any_order())
def test_a_row_continues_no_later_row_whatever_is_said(session):
    keys, tokens, declared = session
    tries = PrefixTries.from_tokens(
        [np.array(ids) for ids in tokens], list(map(session_of_key, keys))
    )
    found = parent_rows(tries, keys, range(len(keys)), declared, {})
    for row, key in enumerate(keys):
        begins = [
            other
            for other, other_key in enumerate(keys)
            if session_of_key(other_key) == session_of_key(key)
            and index_of_key(other_key) < index_of_key(key)
            and tokens[row][: len(tokens[other])] == tokens[other]
        ]
        if any(session_of_key(keys[said]) == session_of_key(key) for said in declared):
            want = declared.get(row)
            assert found.get(row) == (want if want in begins else None)
            continue
        shorter = [other for other in begins if len(tokens[other]) < len(tokens[row])]
        longest = max(map(len, (tokens[other] for other in shorter)), default=None)
        assert (row in found) == bool(shorter)
        assert not shorter or (found[row] in shorter and len(tokens[found[row]]) == longest)


@pytest.mark.parametrize("setting", ["repeated_tokens=once", "advantages=session"])
def test_a_row_that_is_said_to_extend_a_later_one_is_trained(setting):
    trainer = padded_trainer(f"padding.{setting}")
    rows = {"p0_0_0": ([5, 6], [7]), "p0_0_1": ([5], [6])}
    batch = put_grown_sessions(rows, extra_fields=[{"extends": 1}, {"extends": None}])
    trainer._balance_batch(batch, {})
    assert trainer.steps.current.prefixes.parent_R == [None, None]
    assert trainer.steps.current.prefixes.declaring == {"p0_0"}
    strip(trainer.steps.current.pads)


def test_extra_fields_that_are_something_else_say_nothing():
    assert continued(
        grown_sessions([2], prompts=1), extra_fields=[None, "a word of the user's own"]
    ) == [None, 0]


def test_routes_forbid_sharing_and_leave_what_happened_as_it_is():
    rows = grown_sessions([2], prompts=1)
    routes = [
        torch.full((len(a) + len(b), 1, 1), turn) for turn, (a, b) in enumerate(rows.values())
    ]
    prefixes = detect(rows, routed_experts=routes)
    assert prefixes.by_tokens.has_shared_tokens
    assert not prefixes.by_outputs.has_shared_tokens
    assert prefixes.parent_R == [None, 0]


@pytest.mark.parametrize(
    ("values", "continues"), [((0.0, 1.0), [None, None]), ((1.0, 1.0), [None, 0])]
)
def test_rows_of_other_images_neither_share_nor_continue(values, continues):
    images = [
        {"pixel_values": torch.full((turn + 1, 2), value)} for turn, value in enumerate(values)
    ]
    prefixes = detect(grown_sessions([2], prompts=1), images=True, multi_modal_inputs=images)
    assert prefixes.has_images
    assert prefixes.parent_R == continues
    assert prefixes.by_outputs.has_shared_tokens == (continues != [None, None])


def test_rows_of_text_of_a_model_that_sees_images_share_across_sessions():
    rows = branching_rows(prompts=2, rollouts=2)
    prefixes = detect(rows, images=True, multi_modal_inputs=[{}] * len(rows))
    assert not prefixes.has_images
    assert prefixes.by_outputs.has_branches


@pytest.mark.parametrize("place", ["0", -1, True, 1.0])
def test_what_no_row_can_be_is_refused_with_the_row(place):
    with pytest.raises(
        PaddingDataError,
        match=r"row 'p0_0_1': extra_fields\['extends'\] is .*position of a row in its",
    ):
        declared(grown_sessions([2], prompts=1), {"p0_0_1": place})
