"""Uids that tell the order of the data set, and batches whose plan does not depend on which session
ended first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_padding.pads.prompt_order import data_order, ordered_uid, place_of

EXAMPLES = settings(max_examples=60)
PLACES = st.tuples(st.integers(0, 10**7 - 1), st.integers(0, 10**7 - 1))


@st.composite
def prompts(draw):
    """Place of each prompt in the data set, and the number of rows of each of its sessions; some
    rows in all."""
    places = draw(st.lists(PLACES, min_size=1, max_size=10, unique=True))
    sessions = st.lists(st.sampled_from([0, 1, 2, 3, 4, 11]), min_size=1, max_size=3)
    rows = [draw(sessions) for _ in places]
    rows[0][0] += 1
    return list(zip(places, rows, strict=True))


def keys_of(uids, prompts):
    return [
        f"{uid}_{session}_{index}"
        for uid, (_, sessions) in zip(uids, prompts, strict=True)
        for session, rows in enumerate(sessions)
        for index in range(rows)
    ]


@EXAMPLES
@given(places=st.lists(PLACES, min_size=2, max_size=20))
def test_uids_tell_their_place_sort_by_it_and_no_two_are_alike(places):
    uids = [ordered_uid(*place) for place in places]

    assert [place_of(uid) for uid in uids] == places
    assert len(set(uids)) == len(uids)
    assert [place_of(uid) for uid in sorted(uids)] == sorted(places)


VERSION_1, VERSION_4 = (
    "1e8b6a3e-e922-11f1-b061-02fc00000001",
    "de027927-1339-40fb-94d5-61baf6654909",
)


@pytest.mark.parametrize(
    "uid", ["", "p0", VERSION_1, VERSION_4, "step0000001-0000002-0123456789abcdef0"]
)
def test_uids_of_others_have_no_place(uid):
    assert place_of(uid) is None


@EXAMPLES
@given(prompts=prompts(), data=st.data())
def test_rows_are_put_in_the_order_of_the_data_set(prompts, data):
    known = data.draw(st.lists(st.booleans(), min_size=len(prompts), max_size=len(prompts)))
    uids = [
        ordered_uid(*p) if known[number] else f"p{number}" for number, (p, _) in enumerate(prompts)
    ]
    keys = data.draw(st.permutations(keys_of(uids, prompts)))
    arrived = list(dict.fromkeys(key.split("_")[0] for key in keys))

    def rank(key):
        uid, session, index = key.split("_")
        place = place_of(uid)
        return place is None, place or arrived.index(uid), int(session), int(index)

    assert [keys[row] for row in data_order(keys)] == sorted(keys, key=rank)
