"""Filters of clients' queries, with three-valued logic over Python values as the reference.

The reference evaluates the tree of Python's own parser for each row; null is `None`. A filter that
is accepted selects the same rows of a table with each type of column.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa

from fuzz import mutation
from iskander.errors import FilterError
from iskander.lake.filters import parse_filter

ITERATIONS = 250
TABLE = pa.table(
    {
        "i": pa.array([-1, 0, 1, None, 300, (1 << 53) + 1], pa.int64()),
        "u": pa.array([0, 1, 255, None, 7, 7], pa.uint8()),
        "f": pa.array([-1.5, 0.0, 0.5, None, 1e300, 3.0], pa.float64()),
        "s": pa.array(["", "a", "b", None, "é", "a b"]),
        "b": pa.array([True, False, True, None, False, None]),
        "d": pa.array(["a", "b", "a", None, "", "b"]).dictionary_encode(),
    }
)
ROWS: list[dict[str, Any]] = TABLE.to_pylist()
INTEGERS = ("i", "u")
WORDS = [
    *TABLE.column_names, " and ", " or ", " not ", "(", ")", " is null", " is not null", "==", "!=",
    "<", "<=", ">", ">=", " in ", " not in ", "[", "]", ",", "1", "0", "-", "+", "0.5", "300", "7",
    "'a'", '"b"', "''", "True", "False", "null", "None", 'col("i")', "col('s')", "1e999", "0x10",
    "1_0", "9007199254740993", "é", "\\x41", "f'", "lambda: ", ":=", "**", "i.x", "i[0]", "\n",
    "'\\ud800'", "'\\udcff'", 'col("\\udcff")', "#", "-" * 1500, "(" * 150, "not " * 60,
]  # fmt: skip
OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def seeds() -> list[bytes]:
    filters = [
        "i > 0 and s == 'a'", "not (f < 0.5 or b)", "s in ['a', 'b'] and d is not null",
        "0 < i <= 300", "u not in (1, 255) or i is null", 'col("f") != -1.5', "not not b",
        "d == 'a' or d in {'b'}", "i in [0.5, 1]", "not (i in [1, 300])", "i == u",
    ]  # fmt: skip
    return [each.encode() for each in filters]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    text = raw.decode(errors="replace")
    at = random.randrange(len(text) + 1)
    end = min(at + random.choice((0, 0, 1, 2, 5)), len(text))
    if not random.randrange(6):
        more = other.decode(errors="replace")
        return f"({text}) {random.choice(('and', 'or'))} not ({more})".encode()
    if not random.randrange(6):
        return mutation.flip(raw, other, random)
    return (text[:at] + random.choice(WORDS) + text[end:]).encode(errors="replace")


def run(raw: bytes) -> None:
    text = raw.decode(errors="replace")
    try:
        row_filter = parse_filter(text)
        expression = row_filter.expression(TABLE.schema)
    except FilterError as error:
        assert str(error)
        return
    assert set(row_filter.columns) <= set(TABLE.column_names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text.strip(), mode="eval").body
    try:
        found = TABLE.filter(expression).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Two columns without a common type; scoring reports it with the filter.
        assert any(isinstance(node, ast.Compare) for node in ast.walk(tree))
        return
    expected = [row for row in ROWS if value_of(tree, row) is True]
    assert found == expected, f"{len(found)} rows, expected {len(expected)}"


def value_of(node: ast.expr, row: dict[str, Any]) -> Any:
    """The value of a node for a row; None is null."""
    if isinstance(node, ast.BoolOp):
        values = [value_of(each, row) for each in node.values]
        deciding = isinstance(node.op, ast.Or)
        if deciding in values:
            return deciding
        return None if None in values else not deciding
    if isinstance(node, ast.UnaryOp):
        value = value_of(node.operand, row)
        if isinstance(node.op, ast.Not):
            return None if value is None else not value
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Compare):
        lefts = [node.left, *node.comparators]
        pairs = zip(lefts, node.ops, node.comparators, strict=False)
        values = [compared(left, test, right, row) for left, test, right in pairs]
        return False if False in values else None if None in values else True
    if isinstance(node, ast.Name):
        return None if node.id.lower() == "null" else row[node.id]
    if isinstance(node, ast.Call):
        (name,) = node.args
        return row[ast.literal_eval(name)]
    return ast.literal_eval(node)


def compared(left: ast.expr, test: ast.cmpop, right: ast.expr, row: dict[str, Any]) -> Any:
    """The result of one comparison."""
    value = value_of(left, row)
    if isinstance(test, ast.Is | ast.IsNot):
        return (value is None) == isinstance(test, ast.Is)
    if isinstance(test, ast.In | ast.NotIn):
        assert isinstance(right, ast.List | ast.Tuple | ast.Set)
        members = [value_of(each, row) for each in right.elts]
        return None if value is None else (value in members) == isinstance(test, ast.In)
    other = value_of(right, row)
    if value is None or other is None:
        return None
    return OPERATORS[type(test)](value, other)
