"""The arithmetic tool: exact, and strict about what it takes."""

import asyncio
from fractions import Fraction
from types import SimpleNamespace

import pytest

from verl_padding.recipes.subagents.arithmetic import (
    LONGEST,
    CalculateTool,
    NotArithmeticError,
    evaluate,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 2 + 3 * 4 ", 14),
        ("-2 - -3", 1),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("((1 - 4) * 2) / (0.5 + 4)", Fraction(-4, 3)),
    ],
)
def test_expressions_have_the_value_of_arithmetic(text, value):
    assert evaluate(text) == value


NONE = [
    "",
    "1 +",
    "1 2",
    "abs(-1)",
    "\u0661",
    "(" * 99 + ")" * 99,
    "2 ** 9",
    "1_0",
    "1, 2",
    "(1)(2)",
]


@pytest.mark.parametrize("text", [*NONE, "1 / 0", "1" * (LONGEST + 1)])
def test_anything_else_is_refused(text):
    with pytest.raises(NotArithmeticError):
        evaluate(text)


def test_the_tool_answers_a_mistake_which_is_no_result():
    desk = SimpleNamespace(replies=["1", "x"], calculated="3")
    of_tool = SimpleNamespace(function=SimpleNamespace(name="calculate"), model_dump=lambda **_: {})
    for expression, why in (("sum", "only numbers"), ("1 / 0", "a division by zero")):
        call = CalculateTool({}, of_tool).execute(
            "", {"expression": expression}, agent_data=SimpleNamespace(desk=desk)
        )
        assert asyncio.run(call)[0].text.startswith(f"error: {why}")
    assert desk.calculated == "3"
