"""Tokens that several rows of a session have, trained once: against a comparison of every pair."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.driver.test_advantages import continued
from tests.support.rows_in_queue import read_columns
from tests.support.sessions_that_grow import put_grown_sessions
from tests.support.split_sessions import Row, sessions, split
from tests.support.trainer_without_workers import padded_trainer
from verl_padding.pads.upsampling import strip
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.row_keys import index_of_key, session_of_key
from verl_padding.prefix_sharing.detection import PrefixDetection
from verl_padding.prefix_sharing.repeated_tokens import mask_repeated_tokens, repeated_tokens

ROWS = {
    "a_0_0": ([5], [6]),
    "a_0_1": ([5], [6, 7, 8]),
    "a_0_2": ([5, 6], [7, 9]),
    "a_1_0": ([5], [6, 6]),
    "b_0_0": ([5], [6]),
}
MASKS = [[1], [1, 0, 1], [0, 1], [1, 1], [1]]
"""The 7 is what a tool has said; of the session a_0 the 6 is trained twice."""


def masks_trained_once(rows, *, said):
    """What is left of the masks of rows whose agent loop says what they extend, or nothing."""
    keys, masks = [row.key for row in rows], [torch.tensor(row.mask) for row in rows]
    ids_R = [np.array(row.prompt + row.response) for row in rows]
    prefixes = SimpleNamespace(
        by_samples=PrefixTries.from_tokens(ids_R, list(map(session_of_key, keys))),
        declaring=set(map(session_of_key, keys)) if said else set(),
        parent_R=continued(rows, said=said),
    )
    for row, again in repeated_tokens(keys, masks, prefixes).items():
        masks[row] = masks[row] * ~again
    return masks


def masks_by_hand(rows, *, said):
    """A token's sample: where it stands first, going back through the rows that a row extends; or
    the tokens up to it."""
    row_of = {row.key: row for row in rows}

    def sample(row, place):
        if not said:
            return session_of_key(row.key), *(row.prompt + row.response)[: place + 1]
        while row.extends is not None:
            earlier = row_of[f"{session_of_key(row.key)}_{row.extends}"]
            if place >= len(earlier.prompt + earlier.response):
                break
            row = earlier
        return row.key, place

    seen, left = set(), {}
    for row in sorted(rows, key=lambda row: (session_of_key(row.key), index_of_key(row.key))):
        samples = [sample(row, len(row.prompt) + place) for place in range(len(row.mask))]
        trained = [
            bool(of_token and each not in seen)
            for of_token, each in zip(row.mask, samples, strict=True)
        ]
        seen |= {each for each, of_token in zip(samples, row.mask, strict=True) if of_token}
        left[row.key] = torch.tensor(trained, dtype=torch.int64)
    return [left[row.key] for row in rows]


@pytest.mark.parametrize("said", [True, False], ids=["its agent loop says how", "nothing is said"])
@settings(max_examples=40)
@given(data=st.data())
def test_so_it_is_however_a_session_is_split(said, data):
    drawn = data.draw(sessions(said=said))
    rows = [row for session in drawn for row in data.draw(split(session, said=said))]
    got, want = masks_trained_once(rows, said=said), masks_by_hand(rows, said=said)
    assert list(map(torch.Tensor.tolist, got)) == list(map(torch.Tensor.tolist, want))
    if said:  # each action once, and no other token
        actions = [
            (session_of_key(row.key), action)
            for row, mask in zip(rows, got, strict=True)
            for action, kept in zip(row.actions, mask.tolist(), strict=True)
            if kept
        ]
        want_actions = [
            (session.name, action) for session in drawn for action in session.in_one_row().actions
        ]
        assert sorted(actions) == sorted(each for each in want_actions if each[1] is not None)


@st.composite
def rows_with_masks(draw):
    """Rows of a session in any order, of few tokens, so that many begin alike; each with a mask of
    its own, as an attempt that was aborted has none of."""
    rows = []
    for index in draw(st.permutations(range(draw(st.integers(2, 6))))):
        prompt = [1, *draw(st.lists(st.integers(1, 2), max_size=2))]
        row = Row(f"a_0_{index}", prompt)
        row.response = draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))
        row.mask = [draw(st.integers(0, 1)) for _ in row.response]
        rows.append(row)
    return rows


@settings(max_examples=100)
@given(rows=rows_with_masks())
def test_a_token_is_masked_where_an_earlier_row_trains_it_and_nowhere_else(rows):
    """A token that an earlier row has and does not train is still to be trained."""
    got, want = masks_trained_once(rows, said=False), masks_by_hand(rows, said=False)
    assert list(map(torch.Tensor.tolist, got)) == list(map(torch.Tensor.tolist, want))


def put(**fields):
    masks = list(map(torch.tensor, MASKS))
    return put_grown_sessions(ROWS, response_mask=masks, loss_mask=masks, **fields)


def masks_of(batch):
    """What is in TransferQueue, in the order of :data:`ROWS`."""
    found, loss_masks = read_columns(batch, "response_mask", "loss_mask")
    assert list(map(torch.Tensor.tolist, loss_masks)) == list(map(torch.Tensor.tolist, found))
    assert {mask.dtype for mask in found} == {torch.int64}
    of_key = {key: mask.tolist() for key, mask in zip(batch.keys, found, strict=True)}
    return [of_key[key] for key in ROWS]


@pytest.mark.ray
@pytest.mark.usefixtures("empty_queue")
def test_masks_are_cut_before_anything_reads_them():
    trainer = padded_trainer("padding.repeated_tokens=once", "padding.weighting=session")
    batch, metrics = put(), {}
    trainer._balance_batch(batch, metrics)
    assert masks_of(batch) == [[1], [0, 0, 1], *MASKS[2:]]
    assert metrics["padding/repeated_tokens/total"] == 1
    weight_of = dict(zip(batch.keys, trainer.steps.current.weights("actor"), strict=True))
    # With token-mean, a token of a session of three weighs two thirds of one in a session of two.
    assert weight_of["a_0_0"] == weight_of["a_0_1"] == pytest.approx(weight_of["a_1_0"] * 2 / 3)
    strip(trainer.steps.current.pads)
    trainer._balance_batch(batch, metrics)
    assert metrics["padding/repeated_tokens/total"] == 0, "nothing is left to mask"


def routes(first, later):
    """Of each row: those of a_0_0 are ``first``."""
    lengths = [len(prompt) + len(response) for prompt, response in ROWS.values()]
    return [
        torch.full((length, 1, 1), later if row else first) for row, length in enumerate(lengths)
    ]


def images(first, later):
    return [{"pixel_values": torch.full((1, 2), later if row else first)} for row in range(5)]


@pytest.mark.ray
@pytest.mark.usefixtures("empty_queue")
@pytest.mark.parametrize(
    ("fields", "repeated"),
    [
        ({"extra_fields": [{"extends": None}, {"extends": 0}, *[{}] * 3]}, 1),
        ({"extra_fields": [{"extends": None}, {"extends": None}, *[{}] * 3]}, 0),
        ({"extra_fields": [{}, {}, {"extends": 0}, *[{}] * 2]}, 0),
        ({"routed_experts": routes(0, 0)}, 1),
        ({"routed_experts": routes(0, 1)}, 0),
        ({"teacher_logprobs": [each[..., 0].float() for each in routes(0, 1)]}, 1),
        ({"multi_modal_inputs": images(0.0, 0.0)}, 1),
        ({"multi_modal_inputs": images(0.0, 1.0)}, 0),
    ],
)
def test_extends_decides_and_other_routes_or_images_mask_nothing(fields, repeated):
    batch = put(**fields)
    assert mask_repeated_tokens(batch, PrefixDetection(batch, may_have_images=True)) == (repeated)
    assert masks_of(batch) == ([[1], [0, 0, 1], *MASKS[2:]] if repeated else MASKS)
