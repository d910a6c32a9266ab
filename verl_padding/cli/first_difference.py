"""Where two texts part."""

from typing import AnyStr


def first_difference(one: AnyStr, other: AnyStr) -> int:
    """How many characters of two texts, or bytes, are equal up to where they part.

    By bisection: to compare slices takes a small part of what a look at each character does.
    """
    alike, differs = 0, min(len(one), len(other)) + 1
    while differs - alike > 1:
        middle = (alike + differs) // 2
        if one[alike:middle] == other[alike:middle]:
            alike = middle
        else:
            differs = middle
    return alike
