"""Language of row filters: a strict parser, and its translation to Arrow expressions.

A filter is a Python expression of column names, numbers, strings, `True` and `False` with `==`,
`!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`, `is null`, `is not null`, `and`, `or`, `not` and
parentheses. `col("name")` is a column whose name is not an identifier. Nothing is evaluated as
Python. A row stays if the condition is true; a comparison with null is neither true nor false, and
so is its negation, as in SQL.

Pure. Runs in: the operator's tool.
"""

from __future__ import annotations

import ast
import difflib
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from iskander.errors import FilterError, utf8_problem

BYTES_MAX: Final = 8192
DEPTH_MAX: Final = 50
VALUES_MAX: Final = 1000
"""Limit of the values of one `in`."""
GRAMMAR: Final = (
    "comparisons of columns and values, `in [...]`, `is null`, `and`, `or`, `not` and "
    'parentheses; col("name") for a name that is not an identifier'
)
_OPERATORS: Final[dict[type[ast.cmpop], Callable[[Any, Any], pc.Expression]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Condition(NamedTuple):
    """Condition of the rows of files.

    Attributes:
        rows: Condition of a row.
        ranges: Weaker condition for statistics: the least and the greatest value of each column, as
            in Parquet. Statistics ignore NaN, so a comparison that is true for NaN, such as
            `x != 5`, counts as true for every column of floating-point numbers.
    """

    rows: pc.Expression
    ranges: pc.Expression


@dataclass(frozen=True)
class Filter:
    """A parsed filter.

    Attributes:
        text: The filter as the user wrote it.
        columns: Columns that the filter reads, sorted.
    """

    text: str
    columns: tuple[str, ...]
    _tree: ast.expr = field(repr=False, compare=False)

    def expression(self, schema: pa.Schema) -> pc.Expression:
        """Translate the filter to an Arrow expression for columns of these types.

        Raises:
            FilterError: A column is missing or twice in the schema, or a value has another type.
        """
        return _Translation(self.text, schema).condition(self._tree, is_negated=False)

    def condition(self, schema: pa.Schema) -> Condition:
        """Translate the filter to expressions for rows and for ranges of values.

        Raises:
            FilterError: As for `expression`.
        """
        weak = _Translation(self.text, schema, is_weak=True)
        return Condition(self.expression(schema), weak.condition(self._tree, is_negated=False))


def parse_filter(text: str) -> Filter:
    """Parse a filter.

    Raises:
        FilterError: The text is not in the language of filters.
    """
    if problem := utf8_problem(text):
        raise FilterError(f"filter {problem}")
    count = len(text.encode())
    if count > BYTES_MAX:
        raise FilterError(f"filter has {count} bytes; at most {BYTES_MAX} are read")
    try:
        with warnings.catch_warnings():
            # Python's parser warns of an unknown escape in a string.
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        detail = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        offset = error.offset if isinstance(error, SyntaxError) else None
        at = f" at character {offset}" if offset else ""
        raise FilterError(f"filter is not valid{at}: {detail}; expected {GRAMMAR}") from None
    columns: set[str] = set()
    _check_condition(text, tree, columns, depth=0)
    if not columns:
        raise FilterError("filter has no column; the same condition holds for each row")
    return Filter(text, tuple(sorted(columns)), tree)


def _check_condition(text: str, node: ast.expr, columns: set[str], *, depth: int) -> None:
    """Check the form of a condition and collect its columns; `_Translation` checks types."""
    if depth > DEPTH_MAX:
        raise FilterError(f"filter has more than {DEPTH_MAX} levels of parentheses or `not`")
    if isinstance(node, ast.BoolOp):
        for operand in node.values:
            _check_condition(text, operand, columns, depth=depth + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check_condition(text, node.operand, columns, depth=depth + 1)
    elif isinstance(node, ast.Compare):
        for left, test, right in _comparisons(node):
            _check_comparison(text, left, test, right, columns)
    elif (name := _column_name(node)) is not None:
        columns.add(name)
    else:
        _reject(text, node, "expected a condition")


def _check_comparison(
    text: str, left: ast.expr, test: ast.cmpop, right: ast.expr, columns: set[str]
) -> None:
    names = [name for operand in (left, right) if (name := _column_name(operand)) is not None]
    if isinstance(test, ast.Is | ast.IsNot):
        if not _is_null(right) or _column_name(left) is None:
            _reject(text, right, "`is` compares a column with null only")
        columns.add(names[0])
        return
    if isinstance(test, ast.In | ast.NotIn):
        if _column_name(left) is None or not isinstance(right, ast.List | ast.Tuple | ast.Set):
            _reject(text, right, "`in` has a column on the left and a list of values on the right")
        if not 0 < len(right.elts) <= VALUES_MAX:
            _reject(text, right, f"`in` has 1 to {VALUES_MAX} values, got {len(right.elts)}")
        for element in right.elts:
            _literal(text, element)
        columns.add(names[0])
        return
    if not names:
        _reject(text, left, "a comparison needs a column on one side")
    columns.update(names)
    for each in (left, right):
        if _column_name(each) is None:
            _literal(text, each)


def _comparisons(node: ast.Compare) -> Iterator[tuple[ast.expr, ast.cmpop, ast.expr]]:
    """Cut `a < b < c` into `a < b` and `b < c`."""
    lefts = [node.left, *node.comparators]
    yield from zip(lefts, node.ops, node.comparators, strict=False)


def _is_null(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is None
    return isinstance(node, ast.Name) and node.id.lower() == "null"


def _column_name(node: ast.expr) -> str | None:
    """Return the name of the column; None if the node is no column."""
    if isinstance(node, ast.Name):
        return None if node.id.lower() == "null" else node.id
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "col"
        and len(node.args) == 1
        and not node.keywords
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ):
        return _require_utf8(node.args[0].value)
    return None


def _require_utf8(text: str) -> str:
    """Return a name or string, or raise a FilterError if it is not UTF-8, as escaped surrogates."""
    if problem := utf8_problem(text):
        raise FilterError(f"filter is not valid: the string {problem}")
    return text


def _literal(text: str, node: ast.expr, *, depth: int = 0) -> bool | int | float | str:
    """Return the value of a literal with its signs, or raise a FilterError."""
    if depth > DEPTH_MAX:
        raise FilterError(f"filter has a number with more than {DEPTH_MAX} signs")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _literal(text, node.operand, depth=depth + 1)
        if type(number) in (int, float):
            return -number if isinstance(node.op, ast.USub) else number  # type: ignore[operator]
        _reject(text, node, "a sign needs a number")
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float, str):
        return _require_utf8(node.value) if isinstance(node.value, str) else node.value  # type: ignore[return-value]
    if _is_null(node):
        _reject(text, node, "a comparison with null is never true; use `is null`")
    _reject(text, node, "expected a number, a string, True or False")


def _reject(text: str, node: ast.expr, reason: str) -> NoReturn:
    part = ast.get_source_segment(text.strip(), node) or text
    raise FilterError(f"filter is not valid at `{part[:80]}`: {reason}; the language has {GRAMMAR}")


class _Translation:
    """Translation of one filter for one schema; `is_weak` is for `Condition.ranges`."""

    def __init__(self, text: str, schema: pa.Schema, *, is_weak: bool = False) -> None:
        self._text = text
        self._schema = schema
        self._is_weak = is_weak

    def condition(self, node: ast.expr, *, is_negated: bool) -> pc.Expression:
        """Translate a condition or its negation.

        A negation is passed down to the comparisons, because Arrow's `is_in` returns false for
        null.
        """
        if isinstance(node, ast.BoolOp):
            parts = [self.condition(operand, is_negated=is_negated) for operand in node.values]
            return _join_conditions(parts, is_and=isinstance(node.op, ast.And) != is_negated)
        if isinstance(node, ast.UnaryOp):
            return self.condition(node.operand, is_negated=not is_negated)
        if isinstance(node, ast.Compare):
            pairs = [self._comparison(*pair, is_negated=is_negated) for pair in _comparisons(node)]
            return _join_conditions(pairs, is_and=not is_negated)
        name = _column_name(node)
        assert name is not None
        kind = self._type(name)
        if not pa.types.is_boolean(kind):
            raise FilterError(
                f"filter uses column {name!r} as a condition, but its type is {kind}", column=name
            )
        return ~_field(name) if is_negated else _field(name)

    def _comparison(
        self, left: ast.expr, test: ast.cmpop, right: ast.expr, *, is_negated: bool
    ) -> pc.Expression:
        name = _column_name(left) if _column_name(left) is not None else _column_name(right)
        assert name is not None
        kind = self._type(name)
        if isinstance(test, ast.Is | ast.IsNot):
            is_null = isinstance(test, ast.Is) != is_negated
            return _field(name).is_null() if is_null else _field(name).is_valid()
        if isinstance(test, ast.In | ast.NotIn):
            assert isinstance(right, ast.List | ast.Tuple | ast.Set)
            values = [self._scalar(name, kind, element) for element in right.elts]
            found = _field(name).isin(_members(values, _value_type(kind)))
            is_in = isinstance(test, ast.In) != is_negated
            if not is_in and self._has_nan(left):
                return pc.scalar(True)
            return found if is_in else _field(name).is_valid() & ~found
        operands = [
            _field(other) if (other := _column_name(operand)) is not None and self._type(other)
            else pc.scalar(self._scalar(name, kind, operand))
            for operand in (left, right)
        ]  # fmt: skip
        if pa.types.is_nested(kind):
            raise FilterError(
                f"filter compares column {name!r}, but type {kind} has no order", column=name
            )
        if isinstance(test, ast.NotEq) != is_negated and self._has_nan(left, right):
            return pc.scalar(True)
        compared = _OPERATORS[type(test)](*operands)
        return ~compared if is_negated else compared

    def _has_nan(self, *nodes: ast.expr) -> bool:
        """Whether a column of a weak comparison may have NaN."""
        names = [name for operand in nodes if (name := _column_name(operand)) is not None]
        kinds = [_value_type(self._type(name)) for name in names]
        return self._is_weak and any(map(pa.types.is_floating, kinds))

    def _type(self, name: str) -> pa.DataType:
        indices = self._schema.get_all_field_indices(name)
        if len(indices) == 1:
            return self._schema.field(indices[0]).type
        if indices:
            raise FilterError(f"filter uses column {name!r}; the input has it twice", column=name)
        near = difflib.get_close_matches(name, self._schema.names, n=1)
        hint = f"; the nearest name is {near[0]!r}" if near else ""
        raise FilterError(f"filter uses column {name!r}; the input has none{hint}", column=name)

    def _scalar(self, name: str, kind: pa.DataType, node: ast.expr) -> pa.Scalar:
        """Convert a literal for the comparison with a column of a type."""
        value = _literal(self._text, node)
        value_type = _value_type(kind)
        is_number = type(value) in (int, float)
        if pa.types.is_boolean(value_type):
            is_valid = isinstance(value, bool)
        elif pa.types.is_integer(value_type) or pa.types.is_floating(value_type):
            is_valid = is_number
        elif pa.types.is_decimal(value_type):
            is_valid = is_number or isinstance(value, str)
        else:
            is_valid = isinstance(value, str)
        try:
            if not is_valid:
                raise FilterError("")
            if is_number and not pa.types.is_decimal(value_type):
                # Arrow widens both sides: 300 is above each uint8, and 0.5 is not cut to 0.
                return pa.scalar(value)
            return pa.scalar(str(value) if is_number else value).cast(value_type)
        except (FilterError, pa.ArrowInvalid, pa.ArrowNotImplementedError, OverflowError):
            raise FilterError(
                f"filter compares column {name!r} of type {kind} with {value!r}; "
                "the value does not convert to this type",
                column=name,
            ) from None


def _value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values, without a dictionary."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _members(values: list[pa.Scalar], kind: pa.DataType) -> pa.Array:
    """Return the values of an `in` in the type of the column, without those beyond this type."""
    members = []
    for each in values:
        try:
            member = each.cast(kind)
        except (pa.ArrowInvalid, OverflowError):
            continue
        if member.as_py() == each.as_py() or member.type == each.type:
            members.append(member)
    numbers = [value.as_py() for value in members]
    if pa.types.is_floating(kind) and 0.0 in numbers:
        # Arrow looks for the bits, and Parquet's statistics have the least zero as -0.0.
        numbers += [0.0, -0.0]
    return pa.array(numbers, type=kind)


def _field(name: str) -> pc.Expression:
    return pc.field(name)


def _join_conditions(parts: list[pc.Expression], *, is_and: bool) -> pc.Expression:
    result = parts[0]
    for part in parts[1:]:
        result = result & part if is_and else result | part
    return result
