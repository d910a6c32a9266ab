"""Arithmetic as a tool: exact, and nothing but arithmetic."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from verl_padding.recipes.subagents.delegation import argument

LONGEST = 200
"""Most characters of an expression: a model may write anything."""
ALLOWED = re.compile(r"[0-9+\-*/(). ]*")
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class NotArithmeticError(ValueError):
    """An expression that is not arithmetic, or has no value."""


def evaluate(expression: str) -> Fraction:
    """The value of an expression of decimal numbers, ``+ - * /`` and brackets.

    Example:
        ``evaluate("(1 + 2) / 4")`` is ``Fraction(3, 4)``.

    Raises:
        NotArithmeticError: it is too long, holds anything else, or divides by zero.
    """
    if len(expression) > LONGEST:
        raise NotArithmeticError(f"{len(expression)} characters, but {LONGEST} at most")
    if not ALLOWED.fullmatch(expression):
        raise NotArithmeticError("only numbers, + - * / and brackets")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise NotArithmeticError("not an expression") from error
    try:
        return _value(tree.body, expression.strip())
    except ZeroDivisionError as error:
        raise NotArithmeticError("a division by zero") from error


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant():
            # By its text: as a float, 0.1 would not be a tenth.
            return Fraction(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            value = _value(node.operand, text)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp() if type(node.op) in OPERATIONS:
            result: Fraction = OPERATIONS[type(node.op)](
                _value(node.left, text), _value(node.right, text)
            )
            return result
    raise NotArithmeticError("only numbers, + - * / and brackets")


def as_text(value: Fraction) -> str:
    """``3``, ``0.75``, or ``1/3`` where decimals do not end."""
    if value.denominator == 1:
        return str(value.numerator)
    places = next(
        (places for places in range(1, LONGEST) if 10**places % value.denominator == 0), None
    )
    if places is None:
        return str(value)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


class CalculateTool(BaseTool):
    """``calculate(expression)`` in verl's form; the expression ``sum`` adds up the replies of all
    sub-agents."""

    async def execute(
        self, instance_id: str, parameters: Mapping[str, Any], **kwargs: Any
    ) -> tuple:
        """The value of the expression, or what is wrong with it: the model gets an answer, never an
        exception."""
        desk = getattr(kwargs.get("agent_data"), "desk", None)
        expression = argument(parameters, "expression")
        if desk is not None and expression.strip() == "sum":
            expression = "+".join(desk.replies)
        try:
            text = as_text(evaluate(expression))
        except NotArithmeticError as error:
            return ToolResponse(text=f"error: {error}"), 0.0, {}
        if desk is not None:
            desk.calculated = text
        return ToolResponse(text=text), 0.0, {}
