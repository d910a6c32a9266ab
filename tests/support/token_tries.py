"""Tokens of rows that branch at random places, and at awkward ones."""

import random

Tokens = list[int]


def random_tries(seed):
    """Rows of several tries, some of which are full prefixes of others, and some equal."""
    draw = random.Random(seed)
    lengths = (1, 2, 3, 5, 63, 64, 65)
    found = []
    for _ in range(1 + seed % 3):
        nodes = [tokens(draw, draw.choice([*lengths[1:], draw.randint(2, 90)]))]
        for _ in range(6):
            before = draw.choice(nodes)
            cut = draw.choice([len(before), len(before) - 1, draw.randint(1, len(before)), 64])
            own = tokens(draw, draw.choice([*lengths, draw.randint(1, 90)]))
            nodes.append(before[: max(cut, 1)] + own)
        found += draw.sample(nodes, 4)
    return found


def tokens(draw, number):
    return [draw.randrange(5, 200) for _ in range(number)]


def awkward_tries():
    draw = random.Random(7)
    trunk = tokens(draw, 150)

    def branching_at(*cuts, own=40):
        return [trunk, *(trunk[:cut] + tokens(draw, own) for cut in cuts)]

    deep = [trunk]
    for cut in (120, 90, 60, 30):
        deep.append(deep[-1][:cut] + tokens(draw, 30))
    return {
        "at the first tokens": branching_at(1, 2, 3, 4),
        "at borders of chunks": branching_at(63, 64, 65, 66, 127, 128, 129),
        "at the last token": [*branching_at(149, 150), trunk[:149] + tokens(draw, 1)],
        "full prefixes": [trunk, trunk[:2], trunk[:64], trunk, *branching_at(100)[1:]],
        "within the convolution's reach": [
            trunk,
            *(trunk[: 70 + n] + tokens(draw, 1 + n) for n in range(4)),
        ],
        "five deep": deep,
        "of one token each": [[*trunk[:5], n] for n in range(5, 15)],
        "several tries": [tokens(draw, 20), *branching_at(64), tokens(draw, 70)],
    }
