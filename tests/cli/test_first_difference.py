"""Where two texts part, against a walk over their characters."""

from itertools import product

from verl_padding.cli.first_difference import first_difference


def walked(one: str, other: str) -> int:
    at = 0
    while at < min(len(one), len(other)) and one[at] == other[at]:
        at += 1
    return at


def test_texts_part_where_a_walk_over_their_characters_finds_it():
    texts = ["".join(letters) for length in range(5) for letters in product("ab", repeat=length)]
    for one, other in product(texts, texts):
        assert first_difference(one, other) == walked(one, other)
        assert first_difference(one.encode(), other.encode()) == walked(one, other)
