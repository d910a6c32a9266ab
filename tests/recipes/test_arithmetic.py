"""The arithmetic tool: exact, and strict about what it takes."""

import asyncio
import contextlib
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_padding.recipes.subagents.arithmetic import LONGEST, CalculateTool, NotArithmeticError, as_text, evaluate


@st.composite
def expressions(draw, depth=3):
    """(text, value) built side by side, with brackets around every operation."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.decimals(0, 99, places=2))
        return str(number), Fraction(str(number))
    left, a = draw(expressions(depth=depth - 1))
    right, b = draw(expressions(depth=depth - 1))
    operation = draw(st.sampled_from("+-*" if b == 0 else "+-*/"))
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operation]
    return f"({left} {operation} {right})", value


@given(expressions())
def test_expressions_have_the_value_they_were_built_with(expression):
    text, value = expression
    if len(text) <= LONGEST:
        assert evaluate(text) == value


def test_precedence_and_signs_are_those_of_arithmetic():
    assert evaluate(" 2 + 3 * 4 ") == 14
    assert evaluate("-2 - -3") == 1
    assert evaluate("0.1 + 0.2") == Fraction(3, 10)


NO_NUMBERS = ["", "1 +", "1..2", "1 2", "1\n2", "abs(-1)", "a", "().__class__", "[1]", "\u0661", "(" * 99 + ")" * 99]
NO_ARITHMETIC = ["2 ** 9", "9 // 2", "1_0", "1e9", "0x10", "1, 2", "1; 2", "1 if 1 else 2", "(1)(2)"]
NO_VALUE = ["1 / 0", "1" * (LONGEST + 1)]


@pytest.mark.parametrize("text", [*NO_NUMBERS, *NO_ARITHMETIC, *NO_VALUE])
def test_anything_else_is_refused(text):
    with pytest.raises(NotArithmeticError):
        evaluate(text)


@given(st.text(max_size=60))
def test_no_text_does_anything_but_give_a_number_or_a_refusal(text):
    with contextlib.suppress(NotArithmeticError):
        assert isinstance(evaluate(text), Fraction)


@pytest.mark.parametrize(
    ("value", "text"),
    [(Fraction(3), "3"), (Fraction(-3, 4), "-0.75"), (Fraction(1, 3), "1/3"), (Fraction(1, 100000), "0.00001")],
)
def test_values_are_written_as_people_write_them(value, text):
    assert as_text(value) == text


@given(st.fractions(-(10**30), 10**30, max_denominator=10**9))
def test_what_is_written_is_exact_and_can_be_read_again(value):
    assert evaluate(as_text(value)) == value


def test_the_tool_adds_up_what_sub_agents_replied_and_answers_a_mistake():
    desk = SimpleNamespace(replies=["1", "2"], calculated=None)
    tool = CalculateTool({}, SimpleNamespace(function=SimpleNamespace(name="calculate"), model_dump=lambda **_: {}))

    def calculate(expression):
        call = tool.execute("", {"expression": expression}, agent_data=SimpleNamespace(desk=desk))
        return asyncio.run(call)[0].text

    assert calculate("sum") == "3"
    assert desk.calculated == "3"
    desk.replies.append("x")
    assert calculate("sum") == "error: only numbers, + - * / and brackets"
    assert calculate("1 / 0") == "error: a division by zero"
    assert desk.calculated == "3", "a mistake is no result"
