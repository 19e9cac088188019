"""Mapping of a table's columns to a model's inputs, with casts that lose nothing.

A column is sent unchanged if the server accepts its type. Otherwise it is cast. If not every value
of its type fits the wanted type, the result is cast back and compared, and a value that would
change is an error. A decimal may become the nearest float if that has the same value at the
decimal's scale.

Runs on: the caller's threads. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from iskander.arrow.columns import column_at, find_column, is_list, is_list_view
from iskander.client.model import ModelDescription
from iskander.client.slicing import string_columns
from iskander.errors import ContractError

VALUE_CHARACTERS_MAX = 100
"""Limit of the characters of a value in an error."""

_EXTENSION = b"ARROW:extension:name"
_BFLOAT16 = "iskander.bfloat16"
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64")
_DIGITS = {"float16": 11, "float32": 24, "float64": 53}
"""Number of bits of the integers that a float represents exactly, by float type."""
_ALIASES = {"halffloat": "float16", "float": "float32", "double": "float64"}
_ELEMENTS = {
    pa.bool8(): "bool",
    pa.utf8(): "utf8",
    pa.large_utf8(): "utf8",
    pa.string_view(): "utf8",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
    pa.binary_view(): "binary",
    pa.date32(): "date32",
    pa.date64(): "date64",
}
_CALENDAR = ("date", "timestamp")
_INTEGER_DECIMAL = pa.decimal128(20, 0)
"""Decimal type that can hold every integer of 64 bits."""
_TRUNCATION = {
    "allow_float_truncate": True, "allow_decimal_truncate": True, "allow_time_truncate": True,
}  # fmt: skip
"""Options of casts that may lose digits, but do not overflow."""
_RELATIVE_MAX = 2.0**-10
"""Largest relative distance between a number and the nearest float16."""
_CASTS = {
    ("number", "number"), ("number", "decimal"), ("decimal", "number"), ("decimal", "decimal"),
    ("text", "text"), ("bytes", "text"), ("calendar", "calendar"), ("time", "time"),
    ("duration", "duration"),
}  # fmt: skip
"""Pairs of kinds of element types between which there are casts; see `_cast_kind`."""


class Matching:
    """Mapping of the columns of one schema to the inputs of one model.

    A column that is no input is sent if the model's contract passes it through, and left out
    otherwise.

    Args:
        model: The model.
        schema: Schema of the batches.
        columns: Input name to column name, where they differ. `a.b` is a field of the struct `a`.
        decimals: Columns whose floating-point numbers were decimal text, for example in CSV. They
            become the nearest numbers of the model's floating-point type.

    Attributes:
        model: The model.
        schema: Schema of the batches that are sent.
        strings: Columns of `schema` that may have strings.

    Raises:
        ContractError: A column is missing, ambiguous, or has a type without a lossless cast. The
            error's fields describe the first problem: `model`, `column`, `wanted`, `got`,
            `nearest`.
    """

    def __init__(
        self,
        model: ModelDescription,
        schema: pa.Schema,
        *,
        columns: Mapping[str, str] | None = None,
        decimals: Collection[str] = (),
    ) -> None:
        self.model = model
        self._decimals = decimals
        self._given = schema
        self._columns = dict(columns or {})
        self._problems: list[ContractError] = []
        self._require_known_inputs(self._columns)
        inputs = self._merge_struct_fields([*self._match_inputs(), *self._match_groups()])
        sent = [*inputs, *self._match_passthrough(inputs)]
        # Columns are sent in the order of the given schema.
        self._sent = sorted(sent, key=lambda column: column.path)
        self._raise_problems()
        self.schema = pa.schema([each.field for each in self._sent])
        self.strings = string_columns(self.schema)
        self._is_identity = [each.path for each in self._sent] == [
            (index,) for index in range(len(schema))
        ] and not any(column.is_changed for column in self._sent)

    def apply(self, batch: pa.RecordBatch, *, first_row: int = 0) -> pa.RecordBatch:
        """Return the columns of a batch that are sent, cast where needed.

        Args:
            batch: A batch of the schema.
            first_row: Number of the batch's first row, for errors.

        Raises:
            ContractError: A value cannot be represented in the wanted type; the error has the field
                `row`.
        """
        if not batch.schema.equals(self._given, check_metadata=True) and not _has_equal_fields(
            batch.schema, self._given
        ):
            text = "all batches have one schema, also in the metadata of fields"
            raise ContractError(f"{text}; this batch has another")
        if self._is_identity:
            return batch
        columns = [self._convert_column(column, batch, first_row) for column in self._sent]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _convert_column(self, sent: _Sent, batch: pa.RecordBatch, first_row: int) -> Any:  # noqa: ANN401
        array = column_at(batch, sent.path)
        if sent.cast is None:
            return array
        try:
            return sent.cast.convert(array)
        except _LossError as error:
            raise self._loss_error(sent, sent.cast, array, first_row) from error

    def _loss_error(self, sent: _Sent, cast: _Cast, array: Any, first_row: int) -> ContractError:  # noqa: ANN401
        row = _first_lossy_row(cast, array)
        lossy = _without_encoding(array.slice(row, 1))
        model, wanted, got = self.model.name, sent.declared, _type_name(sent.given)
        # Formatted by Arrow, because Python objects of nanoseconds need pandas.
        value = lossy.to_string(skip_new_lines=True)[1:-1][:VALUE_CHARACTERS_MAX]
        text = f"column `{sent.source}`: row {first_row + row} has {value}, "
        types = f"model `{model}` has {wanted}, got {got}"
        if cast.has_near_value(lossy):
            text += f"which {wanted} cannot represent exactly; {types}"
            text += "; cast the column to accept the loss"
        else:
            text += f"which {wanted} cannot represent; {types}"
        return ContractError(
            text, model=model, column=sent.source, wanted=wanted, got=got, row=first_row + row
        )

    def _require_known_inputs(self, columns: Mapping[str, str]) -> None:
        model = self.model
        known = [*model.input_types, *model.ranked_within]
        if not isinstance(model.passthrough, str):
            known += model.passthrough
        for name in columns:
            if name not in known:
                nearest = _nearest_name(name, known)
                text = f"`columns` names `{name}`, which is no input{_nearest_hint(nearest)}"
                self._add_problem(text, name, nearest=nearest)

    def _match_inputs(self) -> Iterator[_Sent]:
        wanted_all = self.model.input_types
        if not len(self._given) and wanted_all:
            names = ", ".join(f"`{name}`" for name in wanted_all)
            self._add_problem(f"the data has no columns; wanted {names}", next(iter(wanted_all)))
            return
        for name, declared in wanted_all.items():
            found = self._find_column(name, declared)
            wanted = find_column(self.model.input_schema, name)
            if found is None:
                continue
            path, field = found
            source, given, cast = self._source(name), field, None
            if wanted is None:
                yield _Sent(name, source, path, field)
                continue
            if source in self._decimals and _is_float(field) and _is_float(wanted.field):
                if field.type != wanted.field.type:
                    kind = pa.field(field.name, wanted.field.type)
                    cast = _Cast(field.type, kind, is_checked=True, is_safe=False, is_nearest=True)
                    field = kind
            elif not _is_accepted(field, wanted.field, declared):
                cast = _plan_cast(field, wanted.field, declared)
                if cast is None:
                    got = _type_name(field)
                    text = f"column `{source}`: wanted {declared}, got {got}"
                    self._add_problem(text, source, wanted=declared, got=got)
                    continue
                field = cast.field
            yield _Sent(name, source, path, field, given, declared, cast)

    def _match_groups(self) -> Iterator[_Sent]:
        """Yield the columns within whose groups rows are ranked."""
        for name in self.model.ranked_within:
            found = (
                None
                if not name
                else self._find_column(name, "a column that rows are ranked within")
            )
            if found is not None:
                yield _Sent(name, self._source(name), found[0], found[1])

    def _match_passthrough(self, sent: Sequence[_Sent]) -> Iterator[_Sent]:
        """Yield the columns that are sent because the results repeat them."""
        passthrough, names = self.model.passthrough, {column.name for column in sent}
        used = {each.path[0] for each in sent}
        results = set(self.model.output_schema.names)
        if passthrough == "all":
            wanted = {self._given.names[i]: i for i in range(len(self._given)) if i not in used}
        else:
            listed = () if isinstance(passthrough, str) else passthrough
            sources = {name: self._source(name) for name in listed if name not in names}
            present = {
                name: source for name, source in sources.items() if self._column_count(source)
            }
            wanted = {name: self._given.names.index(source) for name, source in present.items()}
        for name, index in wanted.items():
            field = self._given.field(index)
            if self._column_count(field.name) > 1:
                if any(problem.column == field.name for problem in self._problems):
                    continue
                self._add_problem(
                    f"{self._column_count(field.name)} columns are named `{field.name}`", field.name
                )
            elif name in names:
                source = self._source(name)
                text = f"column `{name}` cannot be returned: the input `{name}` is `{source}`"
                self._add_problem(text, name)
            elif name in results:
                text = f"column `{name}` would be returned and is also a result"
                self._add_problem(f"{text}; rename or drop it", name)
            else:
                yield _Sent(name, field.name, (index,), field.with_name(name))

    def _merge_struct_fields(self, sent: Sequence[_Sent]) -> list[_Sent]:
        """Return the columns without repeats.

        A struct is one column unless a field needs a change.
        """
        kept: dict[tuple[str, tuple[int, ...]], _Sent] = {}
        split = {
            column.path[0] for column in sent if len(column.path) > 1 and self._is_split(column)
        }
        for column in sent:
            if len(column.path) > 1 and column.path[0] not in split:
                field = self._given.field(column.path[0])
                whole = _Sent(field.name, field.name, column.path[:1], field)
                kept.setdefault((whole.name, whole.path), whole)
            else:
                kept.setdefault((column.name, column.path), column)
        return list(kept.values())

    def _is_split(self, sent: _Sent) -> bool:
        return sent.cast is not None or sent.name != sent.source

    def _find_column(self, name: str, wanted: str) -> tuple[tuple[int, ...], pa.Field] | None:
        source = self._source(name)
        for repeated in (source, source.partition(".")[0]):
            count = self._column_count(repeated)
            if count > 1:
                text = f"{count} columns are named `{repeated}`, which the model needs once"
                self._add_problem(text, repeated, wanted=wanted)
                return None
            if count:
                break
        found = find_column(self._given, source)
        if found is None:
            nearest = _nearest_name(source, self._given.names)
            text = f"column `{source}` is missing: wanted {wanted}{_nearest_hint(nearest)}"
            self._add_problem(text, source, wanted=wanted, nearest=nearest)
            return None
        return found.indices, found.field.with_name(name)

    def _source(self, name: str) -> str:
        return self._columns.get(name, name)

    def _column_count(self, name: str) -> int:
        return len(self._given.get_all_field_indices(name))

    def _add_problem(
        self,
        problem: str,
        column: str,
        *,
        wanted: str | None = None,
        got: str | None = None,
        nearest: str | None = None,
    ) -> None:
        if any(earlier.message == problem for earlier in self._problems):
            return
        model = self.model.name
        self._problems.append(
            ContractError(
                problem, model=model, column=column, wanted=wanted, got=got, nearest=nearest
            )
        )

    def _raise_problems(self) -> None:
        if self._problems:
            texts = "; ".join(problem.message for problem in self._problems)
            text = f"the columns do not match model `{self.model.name}`: {texts}"
            raise ContractError(text, **self._problems[0].fields)


class _Sent(NamedTuple):
    """A column that is sent.

    Attributes:
        name: Name with which the column is sent.
        source: Name in the given schema.
        path: Index in the given schema; for a field of a struct, followed by its index there.
        field: Field with which the column is sent.
        given: Field in the given schema; None unless the column is an input.
        declared: Declared type of the input.
        cast: Cast of the column; None if it is sent unchanged.
    """

    name: str
    source: str
    path: tuple[int, ...]
    field: pa.Field
    given: pa.Field | None = None
    declared: str = ""
    cast: _Cast | None = None

    @property
    def is_changed(self) -> bool:
        return self.cast is not None or self.name != self.source


class _ListLevels(NamedTuple):
    """A column's type as nested lists of innermost values.

    Attributes:
        levels: Size of each level of lists, outermost first; None: lists of any length.
        innermost: Field of the innermost values.
        is_plain: Whether the server accepts the encoding; False also for a permuted tensor.
    """

    levels: tuple[int | None, ...]
    innermost: pa.Field
    is_plain: bool

    @property
    def element(self) -> str:
        return _element_name(self.innermost)


class _LossError(Exception):
    """A value cannot be represented exactly in the target type."""


class _Cast(NamedTuple):
    """A cast of a column.

    Attributes:
        source: Type before the cast.
        field: Field after the cast.
        is_checked: Whether the result is cast back and compared.
        is_safe: Whether pyarrow checks the cast.
        is_nearest: Whether a value may become the nearest number; only overflow is an error then.
    """

    source: pa.DataType
    field: pa.Field
    is_checked: bool
    is_safe: bool
    is_nearest: bool = False

    def convert(self, array: Any) -> Any:  # noqa: ANN401
        """Cast an array, or raise `_LossError`."""
        unencoded = _without_encoding(array)
        try:
            result = _cast_array(unencoded, _storage_of(self.field.type), {"safe": self.is_safe})
            if self.is_nearest:
                if not pc.is_finite(_innermost_values(result)).equals(pc.is_finite(unencoded)):
                    raise _LossError
            elif self.is_checked:
                back = _cast_array(result, unencoded.type, {"safe": True})
                if not _are_equal(_innermost_values(back), _innermost_values(unencoded)):
                    raise _LossError
        except pa.ArrowInvalid as error:
            raise _LossError from error
        if isinstance(self.field.type, pa.BaseExtensionType):
            return pa.ExtensionArray.from_storage(self.field.type, result)
        return result

    def has_near_value(self, unencoded: Any) -> bool:  # noqa: ANN401
        """Whether a cast with a loss would give values near the values `unencoded` of one row."""
        try:
            result = _innermost_values(
                _cast_array(unencoded, _storage_of(self.field.type), _TRUNCATION)
            )
            result.validate(full=True)  # Checks the number of digits of decimals.
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return False
        if _cast_kind(_element_name(pa.field("", result.type))) not in ("number", "decimal"):
            return True
        if pa.types.is_boolean(result.type):
            return False
        given, near = (
            _cast_array(values, pa.float64(), {"safe": False})
            for values in (_innermost_values(unencoded), result)
        )
        # NaN, infinity and numbers that are out of range have no near value.
        distance = pc.abs(pc.subtract(given, near))
        distance_max = pc.max_element_wise(pc.multiply(pc.abs(given), _RELATIVE_MAX), 1.0)
        is_near = pc.and_(pc.is_finite(distance), pc.less_equal(distance, distance_max))
        return bool(pc.all(is_near, min_count=0).as_py())


def _is_float(field: pa.Field) -> bool:
    return bool(pa.types.is_floating(field.type))


def _is_accepted(field: pa.Field, wanted: pa.Field, declared: str) -> bool:
    """Whether the server accepts a column unchanged; see `arrow.values.is_sent_as`."""
    given, accepted = _list_levels(field), _list_levels(wanted)
    return (
        given.is_plain
        and given.levels == accepted.levels
        and _accepts_element(declared, given.element)
    )


def _accepts_element(declared: str, element: str) -> bool:
    """Whether an input of a declared type accepts values of an element type."""
    inner = declared.rpartition("<")[2].partition(">")[0]
    if inner == "number":
        return _cast_kind(element) == "number" or element == "bfloat16"
    if inner in ("utf8", "binary"):
        return element in ("utf8", "binary")
    return inner in (element, _family(element))


def _list_levels(field: pa.Field) -> _ListLevels:
    kind = field.type
    is_plain, is_encoded = True, False
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        field, is_encoded = pa.field("", kind.value_type), True
    levels: list[int | None] = []
    while is_list(field.type) or pa.types.is_fixed_size_list(field.type):
        is_sized = pa.types.is_fixed_size_list(field.type)
        is_plain = is_plain and (is_sized or not (levels or is_encoded))
        levels.append(field.type.list_size if is_sized else None)
        field = field.type.value_field
    kind = field.type
    if isinstance(kind, pa.FixedShapeTensorType):
        order = list(range(len(kind.shape)))
        is_plain = is_plain and kind.permutation in (None, order)
        levels += kind.shape
        field = pa.field("", kind.value_type)
    if pa.types.is_dictionary(kind):
        values = pa.field("", kind.value_type)
        # The server decodes dictionaries of numbers in lists of any length.
        is_plain = is_plain and levels == [None] and _cast_kind(_element_name(values)) != "text"
        field = values
    return _ListLevels(tuple(levels), field, is_plain)


def _element_name(field: pa.Field) -> str:
    """Return the name of an element type in manifests, or else in pyarrow."""
    kind = field.type
    if _extension_name(field) == _BFLOAT16:
        return "bfloat16"
    if kind in _ELEMENTS:
        return _ELEMENTS[kind]
    if pa.types.is_timestamp(kind):
        return f"timestamp[{kind.unit}]"
    return _type_name(field)


def _extension_name(field: pa.Field) -> str:
    if isinstance(field.type, pa.BaseExtensionType):
        return str(field.type.extension_name)
    return str((field.metadata or {}).get(_EXTENSION, b""), "utf-8", "replace")


def _family(element: str) -> str:
    """Return the first word of a type's name without digits, such as `timestamp` or `decimal`."""
    word = element.partition("[")[0].partition("(")[0]
    return word.rstrip("0123456789")


def _cast_kind(element: str) -> str:
    """Return the kind of an element type, as `_CASTS` has it."""
    if element in (*_INTEGERS, *_FLOATS, "bool"):
        return "number"
    if element in ("utf8", "binary"):
        return "text"
    family = _family(element)
    if family in _CALENDAR:
        return "calendar"
    return "bytes" if family == "fixed_size_binary" else family


def _plan_cast(field: pa.Field, wanted: pa.Field, declared: str) -> _Cast | None:
    """Return a cast to a type that the server accepts; None if every cast may lose values."""
    given, accepted = _list_levels(field), _list_levels(wanted)
    is_null = pa.types.is_null(given.innermost.type)
    is_tensor = isinstance(field.type, pa.FixedShapeTensorType)
    if "bfloat16" in (given.element, accepted.element):
        return None
    if not _sizes_fit(given.levels, accepted.levels) and not (is_null and not given.levels):
        return None
    if is_tensor and not given.is_plain:
        return None
    inner = given.innermost.type
    storage = pa.bool_() if inner == pa.bool8() else _storage_of(inner)
    source, target_type = _element_name(pa.field("", storage)), accepted.innermost.type
    if _accepts_element(declared, source):
        target_type = storage
    elif not is_null and (_cast_kind(source), _cast_kind(accepted.element)) not in _CASTS:
        return None
    elif pa.types.is_timestamp(target_type) and pa.types.is_timestamp(storage):
        target_type = pa.timestamp(target_type.unit, storage.tz)
    target = _nested_list_type(accepted.levels, target_type)
    if is_tensor and given.levels == accepted.levels:
        target = pa.fixed_shape_tensor(target_type, field.type.shape)
    element = _element_name(pa.field("", target_type))
    is_checked = not is_null and source != element and not _is_exact(source, element)
    # An unsafe cast could produce decimals with more digits than their precision.
    is_safe = not is_checked or pa.types.is_decimal(target_type)
    return _if_possible(_Cast(field.type, pa.field(field.name, target), is_checked, is_safe))


def _sizes_fit(given: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether lists of the given sizes can have the wanted sizes; None stands for any size."""
    return len(given) == len(wanted) and all(
        left is None or right is None or left == right
        for left, right in zip(given, wanted, strict=True)
    )


def _is_exact(source: str, target: str) -> bool:
    """Whether a cast keeps every value or fails, so that no comparison is needed."""
    if target in _INTEGERS or (target in _FLOATS and source == "bool"):
        return _cast_kind(source) in ("number", "decimal")
    if target in _FLOATS and source in _FLOATS:
        return _DIGITS[source] <= _DIGITS[target]
    if target in _FLOATS and source in _INTEGERS:
        return int(source.lstrip("uint")) <= _DIGITS[target]
    if _cast_kind(target) == "calendar":
        return _family(target) == "timestamp"
    # Decimals are compared, because pyarrow does not detect every overflow.
    pair = (_cast_kind(source), _cast_kind(target))
    return pair in (("time", "time"), ("duration", "duration")) or _cast_kind(target) == "text"


def _if_possible(cast: _Cast) -> _Cast | None:
    """Return a cast if pyarrow supports it, else None."""
    try:
        cast.convert(pa.nulls(0, cast.source))
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, _LossError):
        return None
    return cast


def _nested_list_type(levels: tuple[int | None, ...], kind: Any) -> Any:  # noqa: ANN401
    """Return the type of nested lists with these sizes, whose innermost type is `kind`."""
    for size in reversed(levels):
        kind = pa.list_(kind) if size is None else pa.list_(kind, size)
    return kind


def _storage_of(kind: Any) -> Any:  # noqa: ANN401
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _without_encoding(array: Any) -> Any:  # noqa: ANN401
    """Return an array without encoding and extension type, and list views as lists."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    elif pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    elif is_list_view(array.type):
        array = _lists_of_views(array)
    if array.type == pa.bool8():
        return array.storage.cast(pa.bool_())
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


def _lists_of_views(array: Any) -> Any:  # noqa: ANN401
    """Return list views as lists, without a cast, whose result in pyarrow 26 is invalid."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)])
    return pa.LargeListArray.from_arrays(offsets, array.flatten(), mask=array.is_null())


def _cast_array(array: Any, target: Any, options: Mapping[str, bool]) -> Any:  # noqa: ANN401
    """Cast an array with options of pyarrow; in two steps if pyarrow has no direct cast."""
    source, wanted = _innermost_type(array.type), _innermost_type(target)
    step = None
    if pa.types.is_float16(source) and not pa.types.is_floating(wanted):
        step = pa.float32()
    elif pa.types.is_float16(wanted) and not pa.types.is_floating(source):
        step = pa.float64()
    elif pa.types.is_integer(source) and pa.types.is_decimal(wanted):
        step = _INTEGER_DECIMAL
    elif pa.types.is_decimal(source) and pa.types.is_floating(wanted):
        # The direct cast to a float does not always return the nearest float.
        step = pa.utf8()
    if step is not None and step != wanted:
        array = _cast_array(
            array, _nested_list_type(_list_levels(pa.field("", array.type)).levels, step), options
        )
    if options.keys() == {"safe"}:
        return array.cast(target, **options)
    return array.cast(options=pc.CastOptions(target, **options))


def _innermost_type(kind: Any) -> Any:  # noqa: ANN401
    return _list_levels(pa.field("", kind)).innermost.type if kind.num_fields else kind


def _innermost_values(array: Any) -> Any:  # noqa: ANN401
    """Return the innermost values of an array."""
    for _ in _list_levels(pa.field("", array.type)).levels:
        array = array.flatten()
    return array.cast(pa.float32()) if pa.types.is_float16(array.type) else array


def _are_equal(left: Any, right: Any) -> bool:  # noqa: ANN401
    """Whether arrays have equal values; NaN equals NaN."""
    same = pc.equal(left, right)
    if pc.all(same, min_count=0).as_py():
        return True
    if not pa.types.is_floating(left.type):
        return False
    both_nan = pc.and_(pc.is_nan(left), pc.is_nan(right))
    return bool(pc.all(pc.or_(same, both_nan), min_count=0).as_py())


def _first_lossy_row(cast: _Cast, array: Any) -> int:  # noqa: ANN401
    """Return the first row that a cast would change, by bisection."""
    start, end = 0, len(array)
    while end - start > 1:
        middle = (start + end) // 2
        try:
            cast.convert(array.slice(start, middle - start))
        except _LossError:
            end = middle
        else:
            start = middle
    return start


def _nearest_name(name: str, names: Sequence[str]) -> str | None:
    """Return the most similar name, ignoring case; None if no name is similar."""
    by_lower = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return by_lower[found[0]] if found else None


def _nearest_hint(nearest: str | None) -> str:
    return f"; the nearest is `{nearest}`" if nearest else ""


def _type_name(field: pa.Field) -> str:
    """Return the name of a field's type in errors."""
    if _extension_name(field) == _BFLOAT16:
        return "bfloat16"
    return _ALIASES.get(str(field.type), str(field.type))


def _has_equal_fields(left: pa.Schema, right: pa.Schema) -> bool:
    """Whether schemas have equal fields; the metadata of the schemas may differ."""
    return bool(left.remove_metadata().equals(right.remove_metadata(), check_metadata=True))
