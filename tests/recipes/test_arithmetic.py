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


NO_NUMBERS = [
    "",
    "1 +",
    "1 2",
    "abs(-1)",
    "\u0661",
    "(" * 99 + ")" * 99,
]
NO_ARITHMETIC = [
    "2 ** 9",
    "1_0",
    "1, 2",
    "(1)(2)",
]
NO_VALUE = ["1 / 0", "1" * (LONGEST + 1)]


@pytest.mark.parametrize("text", [*NO_NUMBERS, *NO_ARITHMETIC, *NO_VALUE])
def test_anything_else_is_refused(text):
    with pytest.raises(NotArithmeticError):
        evaluate(text)


def test_the_tool_adds_up_what_sub_agents_replied_and_answers_a_mistake():
    desk = SimpleNamespace(replies=["1", "2"], calculated=None)
    tool = CalculateTool(
        {}, SimpleNamespace(function=SimpleNamespace(name="calculate"), model_dump=lambda **_: {})
    )

    def calculate(expression):
        call = tool.execute("", {"expression": expression}, agent_data=SimpleNamespace(desk=desk))
        return asyncio.run(call)[0].text

    assert calculate("sum") == "3"
    assert desk.calculated == "3"
    desk.replies.append("x")
    assert calculate("sum") == "error: only numbers, + - * / and brackets"
    assert calculate("1 / 0") == "error: a division by zero"
    assert desk.calculated == "3", "a mistake is no result"
