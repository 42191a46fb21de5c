"""Shape expressions of recipes: integers and config symbols under + - * / and parentheses.

    >>> evaluate("2 * taps * hidden / (group + 0)", {"taps": 2, "hidden": 576, "group": 16})
    144
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dflash_core.errors import RecipeError

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][A-Za-z0-9_]*)|([-+*/()]))")
MAX_DEPTH = 32


def evaluate(expression: str, symbols: Mapping[str, int]) -> int:
    """The value of a shape expression. Division must leave no remainder, since a shape has no fractions.

    Raises:
        RecipeError: SHAPE_EXPRESSION, with the expression and what is wrong with it.
    """
    parser = _Parser(expression, symbols)
    value = parser.sum(0)
    parser.expect_end()
    return value


def symbols_of(expression: str) -> frozenset[str]:
    """The symbols that an expression uses."""
    return frozenset(name for _, name, _ in _tokens(expression) if name)


def _tokens(expression: str) -> list[tuple[str, str, str]]:
    tokens, at = [], 0
    text = expression.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _bad(expression, f"unexpected {text[at:].lstrip()[:1]!r}")
        tokens.append((match[1] or "", match[2] or "", match[3] or ""))
        at = match.end()
    return tokens


def _bad(expression: str, got: str) -> RecipeError:
    return RecipeError(
        "SHAPE_EXPRESSION", "shape expression cannot be evaluated", where=repr(expression),
        expected="integers and symbols of the recipe under + - * / and parentheses", got=got,
        hint="mend the expression in the recipe, or the numbers in config.json that it divides",
    )


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, expression: str, symbols: Mapping[str, int]) -> None:
        self._expression = expression
        self._symbols = symbols
        self._tokens = _tokens(expression)
        self._at = 0

    def sum(self, depth: int) -> int:
        value = self._product(depth)
        while (operator := self._operator("+-")) is not None:
            right = self._product(depth)
            value = value + right if operator == "+" else value - right
        return value

    def expect_end(self) -> None:
        if self._at < len(self._tokens):
            raise _bad(self._expression, f"unexpected {''.join(self._tokens[self._at])!r}")

    def _product(self, depth: int) -> int:
        value = self._atom(depth)
        while (operator := self._operator("*/")) is not None:
            right = self._atom(depth)
            if operator == "*":
                value *= right
            elif right == 0 or value % right:
                raise _bad(self._expression, f"{value} / {right}, which is no whole number")
            else:
                value //= right
        return value

    def _atom(self, depth: int) -> int:
        if self._at == len(self._tokens):
            raise _bad(self._expression, "the end")
        if depth > MAX_DEPTH:
            raise _bad(self._expression, f"parentheses nested deeper than {MAX_DEPTH}")
        number, name, operator = self._tokens[self._at]
        self._at += 1
        if number:
            return int(number)
        if name:
            if name not in self._symbols:
                raise _bad(self._expression, f"symbol {name}, which has no value")
            return self._symbols[name]
        if operator == "(":
            value = self.sum(depth + 1)
            if self._operator(")") is None:
                raise _bad(self._expression, "a parenthesis that is not closed")
            return value
        raise _bad(self._expression, f"unexpected {operator!r}")

    def _operator(self, among: str) -> str | None:
        if self._at < len(self._tokens):
            operator = self._tokens[self._at][2]
            if operator and operator in among:
                self._at += 1
                return operator
        return None
