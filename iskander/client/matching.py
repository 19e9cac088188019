"""Mapping of a table's columns to a model's inputs, with casts that lose nothing.

A column is sent as it is if the server accepts its type. Otherwise it is cast: by type if every
value fits, else value by value, and a value that would change is an error. A decimal may become the
nearest float if that has the same value at the decimal's scale.

Runs on: the caller's threads. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from iskander.client.model import ModelDescription
from iskander.client.slicing import is_list_view, string_columns
from iskander.errors import ContractError

VALUE_CHARACTERS_MAX = 100
"""Characters of a value that an error repeats."""

_EXTENSION = b"ARROW:extension:name"
_BFLOAT16 = "iskander.bfloat16"
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64")
_DIGITS = {"float16": 11, "float32": 24, "float64": 53}
"""Bits of the integers that a float represents exactly."""
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
"""Decimals of all integers."""
_TRUNCATION = {
    "allow_float_truncate": True, "allow_decimal_truncate": True, "allow_time_truncate": True,
}  # fmt: skip
"""Options of casts that may lose digits, but do not overflow."""
_RELATIVE_MAX = 2.0**-10
"""Relative distance of a number and the nearest float16."""
_CASTS = {
    ("number", "number"), ("number", "decimal"), ("decimal", "number"), ("decimal", "decimal"),
    ("text", "text"), ("bytes", "text"), ("calendar", "calendar"), ("time", "time"),
    ("duration", "duration"),
}  # fmt: skip
"""Kinds of element types that have casts."""


class Matching:
    """Columns of one schema as the inputs of one model.

    Columns that are no inputs are sent if the model's contract passes them through, and left out
    otherwise.

    Args:
        model: The model.
        schema: Schema of the batches.
        columns: Name of a column of the batches for the name of an input, where they differ.
            `a.b` is a field of the struct `a`.
        decimals: Columns whose floating-point numbers are decimals without a binary type, such as
            those of CSV. They become the nearest numbers of the model's floating-point type.

    Attributes:
        model: The model.
        schema: Schema of the batches that are sent.
        strings: Columns of `schema` that may have strings.

    Raises:
        ContractError: A column is missing, ambiguous, or of a type without a lossless cast. The
            fields are those of the first problem: `model`, `column`, `wanted`, `got`, `nearest`.
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
        self._require_known(self._columns)
        inputs = self._without_repeats([*self._inputs(), *self._groups()])
        sent = [*inputs, *self._passed_through(inputs)]
        # In the order of the given schema.
        self._sent = sorted(sent, key=lambda each: each.path)
        self._raise_problems()
        self.schema = pa.schema([each.field for each in self._sent])
        self.strings = string_columns(self.schema)
        self._is_identity = [each.path for each in self._sent] == [
            (index,) for index in range(len(schema))
        ] and not any(each.is_changed for each in self._sent)

    def apply(self, batch: pa.RecordBatch, *, first_row: int = 0) -> pa.RecordBatch:
        """Return a batch with the columns that are sent.

        Args:
            batch: A batch of the schema.
            first_row: Number of its first row, for errors.

        Raises:
            ContractError: A value has no exact value in the wanted type; also has the field `row`.
        """
        if not batch.schema.equals(self._given, check_metadata=True) and not _has_equal_fields(
            batch.schema, self._given
        ):
            text = "all batches have one schema, also in the metadata of fields"
            raise ContractError(f"{text}; this batch has another")
        if self._is_identity:
            return batch
        columns = [self._column(each, batch, first_row) for each in self._sent]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _column(self, sent: _Sent, batch: pa.RecordBatch, first_row: int) -> Any:  # noqa: ANN401
        array = _pick(batch, sent.path)
        if sent.cast is None:
            return array
        try:
            return sent.cast.convert(array)
        except _LossError as error:
            raise self._loss_error(sent, sent.cast, array, first_row) from error

    def _loss_error(self, sent: _Sent, cast: _Cast, array: Any, first_row: int) -> ContractError:  # noqa: ANN401
        row = _first_lossy_row(cast, array)
        bad = _plain(array.slice(row, 1))
        model, wanted, got = self.model.name, sent.declared, _name(sent.given)
        # Not as a Python object: nanoseconds need pandas.
        value = bad.to_string(skip_new_lines=True)[1:-1][:VALUE_CHARACTERS_MAX]
        text = f"column `{sent.source}`: row {first_row + row} has {value}, "
        types = f"model `{model}` has {wanted}, got {got}"
        if cast.has_near_value(bad):
            text += f"which {wanted} cannot represent exactly; {types}"
            text += "; cast the column to accept the loss"
        else:
            text += f"which {wanted} cannot represent; {types}"
        return ContractError(
            text, model=model, column=sent.source, wanted=wanted, got=got, row=first_row + row
        )

    def _require_known(self, columns: Mapping[str, str]) -> None:
        model = self.model
        known = [*model.input_types, *model.ranked_within]
        if not isinstance(model.passthrough, str):
            known += model.passthrough
        for name in columns:
            if name not in known:
                nearest = _nearest(name, known)
                text = f"`columns` names `{name}`, which is no input{_hint(nearest)}"
                self._add(text, name, nearest=nearest)

    def _inputs(self) -> Iterator[_Sent]:
        wanted_all = self.model.input_types
        if not len(self._given) and wanted_all:
            names = ", ".join(f"`{name}`" for name in wanted_all)
            self._add(f"the data has no columns; wanted {names}", next(iter(wanted_all)))
            return
        for name, declared in wanted_all.items():
            found = self._find(name, declared)
            wanted = _find_field(self.model.input_schema, name)
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
                    got = _name(field)
                    text = f"column `{source}`: wanted {declared}, got {got}"
                    self._add(text, source, wanted=declared, got=got)
                    continue
                field = cast.field
            yield _Sent(name, source, path, field, given, declared, cast)

    def _groups(self) -> Iterator[_Sent]:
        """The columns that rows are ranked within."""
        for name in self.model.ranked_within:
            found = None if not name else self._find(name, "a column that rows are ranked within")
            if found is not None:
                yield _Sent(name, self._source(name), found[0], found[1])

    def _passed_through(self, sent: Sequence[_Sent]) -> Iterator[_Sent]:
        """The columns that are sent because they are returned."""
        passthrough, names = self.model.passthrough, {each.name for each in sent}
        used = {each.path[0] for each in sent}
        results = set(self.model.output_schema.names)
        if passthrough == "all":
            wanted = {self._given.names[i]: i for i in range(len(self._given)) if i not in used}
        else:
            listed = () if isinstance(passthrough, str) else passthrough
            sources = {name: self._source(name) for name in listed if name not in names}
            present = {name: source for name, source in sources.items() if self._count(source)}
            wanted = {name: self._given.names.index(source) for name, source in present.items()}
        for name, index in wanted.items():
            field = self._given.field(index)
            if self._count(field.name) > 1:
                if any(problem.column == field.name for problem in self._problems):
                    continue
                self._add(f"{self._count(field.name)} columns are named `{field.name}`", field.name)
            elif name in names:
                source = self._source(name)
                text = f"column `{name}` cannot be returned: the input `{name}` is `{source}`"
                self._add(text, name)
            elif name in results:
                text = f"column `{name}` would be returned and is also a result"
                self._add(f"{text}; rename or drop it", name)
            else:
                yield _Sent(name, field.name, (index,), field.with_name(name))

    def _without_repeats(self, sent: Sequence[_Sent]) -> list[_Sent]:
        """Send each struct once, as a whole if no field of it is cast or renamed."""
        kept: dict[tuple[str, tuple[int, ...]], _Sent] = {}
        split = {each.path[0] for each in sent if len(each.path) > 1 and self._is_split(each)}
        for each in sent:
            if len(each.path) > 1 and each.path[0] not in split:
                field = self._given.field(each.path[0])
                whole = _Sent(field.name, field.name, each.path[:1], field)
                kept.setdefault((whole.name, whole.path), whole)
            else:
                kept.setdefault((each.name, each.path), each)
        return list(kept.values())

    def _is_split(self, sent: _Sent) -> bool:
        return sent.cast is not None or sent.name != sent.source

    def _find(self, name: str, wanted: str) -> tuple[tuple[int, ...], pa.Field] | None:
        source = self._source(name)
        for repeated in (source, source.partition(".")[0]):
            count = self._count(repeated)
            if count > 1:
                text = f"{count} columns are named `{repeated}`, which the model needs once"
                self._add(text, repeated, wanted=wanted)
                return None
            if count:
                break
        found = _find_field(self._given, source)
        if found is None:
            nearest = _nearest(source, self._given.names)
            text = f"column `{source}` is missing: wanted {wanted}{_hint(nearest)}"
            self._add(text, source, wanted=wanted, nearest=nearest)
            return None
        return found.path, found.field.with_name(name)

    def _source(self, name: str) -> str:
        return self._columns.get(name, name)

    def _count(self, name: str) -> int:
        return len(self._given.get_all_field_indices(name))

    def _add(
        self,
        problem: str,
        column: str,
        *,
        wanted: str | None = None,
        got: str | None = None,
        nearest: str | None = None,
    ) -> None:
        if any(each.message == problem for each in self._problems):
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
        name: Its name as it is sent.
        source: Its name in the given schema.
        path: Its place in the given schema.
        field: Its field as it is sent.
        given: Its given field, if it is an input.
        declared: The declared type of the input.
        cast: Its cast; None if it is sent as it is.
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


class _Found(NamedTuple):
    path: tuple[int, ...]
    field: pa.Field


class _Form(NamedTuple):
    """Levels of a column's type, outermost first, and its innermost values.

    Attributes:
        levels: Size of each level of lists; None: rows of any length.
        leaf: Field of the innermost values.
        is_plain: Neither encoded in a way that the server rejects, nor a permuted tensor.
    """

    levels: tuple[int | None, ...]
    leaf: pa.Field
    is_plain: bool

    @property
    def element(self) -> str:
        return _element(self.leaf)


class _LossError(Exception):
    """A value has no exact value in the target type."""


class _Cast(NamedTuple):
    """A cast of a column; values are compared after the way back if `is_checked`.

    With `is_nearest`, they are only compared with infinity.
    """

    source: pa.DataType
    field: pa.Field
    is_checked: bool
    is_safe: bool
    is_nearest: bool = False

    def convert(self, array: Any) -> Any:  # noqa: ANN401
        """Cast an array, or raise `_LossError`."""
        plain = _plain(array)
        try:
            result = _cast(plain, _storage_of(self.field.type), {"safe": self.is_safe})
            if self.is_nearest:
                if not pc.is_finite(_leaves(result)).equals(pc.is_finite(plain)):
                    raise _LossError
            elif self.is_checked:
                back = _cast(result, plain.type, {"safe": True})
                if not _equal(_leaves(back), _leaves(plain)):
                    raise _LossError
        except pa.ArrowInvalid as error:
            raise _LossError from error
        if isinstance(self.field.type, pa.BaseExtensionType):
            return pa.ExtensionArray.from_storage(self.field.type, result)
        return result

    def has_near_value(self, plain: Any) -> bool:  # noqa: ANN401
        """Whether a cast with a loss gives values that are near these of one row."""
        try:
            result = _leaves(_cast(plain, _storage_of(self.field.type), _TRUNCATION))
            result.validate(full=True)  # The digits of decimals.
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return False
        if _kind(_element(pa.field("", result.type))) not in ("number", "decimal"):
            return True
        if pa.types.is_boolean(result.type):
            return False
        given, near = (
            _cast(each, pa.float64(), {"safe": False}) for each in (_leaves(plain), result)
        )
        # NaN, infinity and numbers that are out of range have no near value.
        distance = pc.abs(pc.subtract(given, near))
        distance_max = pc.max_element_wise(pc.multiply(pc.abs(given), _RELATIVE_MAX), 1.0)
        is_near = pc.and_(pc.is_finite(distance), pc.less_equal(distance, distance_max))
        return bool(pc.all(is_near, min_count=0).as_py())


def _find_field(schema: pa.Schema, name: str) -> _Found | None:
    """Find a column by its dotted name, as the server does: the longest name wins."""
    parent: Any = schema
    path: list[int] = []
    rest = name
    while True:
        head, index = rest, parent.get_field_index(rest)
        while index < 0 and "." in head:
            head = head.rpartition(".")[0]
            index = parent.get_field_index(head)
        if index < 0:
            return None
        field = parent.field(index)
        path.append(index)
        rest = rest[len(head) + 1 :]
        if not rest:
            return _Found(tuple(path), field)
        if not pa.types.is_struct(field.type):
            return None
        parent = field.type


def _pick(batch: pa.RecordBatch, path: tuple[int, ...]) -> Any:  # noqa: ANN401
    array = batch.column(path[0])
    for index in path[1:]:
        array = pc.struct_field(array, [index])
    return array


def _is_float(field: pa.Field) -> bool:
    return bool(pa.types.is_floating(field.type))


def _is_accepted(field: pa.Field, wanted: pa.Field, declared: str) -> bool:
    """Whether the server accepts a column as it is; see `arrow.values.is_sent_as`."""
    given, form = _form(field), _form(wanted)
    return given.is_plain and given.levels == form.levels and _admits(declared, given.element)


def _admits(declared: str, element: str) -> bool:
    """Whether an input of a declared type accepts values of an element type."""
    inner = declared.rpartition("<")[2].partition(">")[0]
    if inner == "number":
        return _kind(element) == "number" or element == "bfloat16"
    if inner in ("utf8", "binary"):
        return element in ("utf8", "binary")
    return inner in (element, _family(element))


def _form(field: pa.Field) -> _Form:
    kind = field.type
    is_plain, is_encoded = True, False
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        field, is_encoded = pa.field("", kind.value_type), True
    levels: list[int | None] = []
    while _is_list(field.type) or pa.types.is_fixed_size_list(field.type):
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
        is_plain = is_plain and levels == [None] and _kind(_element(values)) != "text"
        field = values
    return _Form(tuple(levels), field, is_plain)


def _is_list(kind: Any) -> bool:  # noqa: ANN401
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or is_list_view(kind))


def _element(field: pa.Field) -> str:
    """The manifest's name of an element type; pyarrow's name for others."""
    kind = field.type
    if _extension_name(field) == _BFLOAT16:
        return "bfloat16"
    if kind in _ELEMENTS:
        return _ELEMENTS[kind]
    if pa.types.is_timestamp(kind):
        return f"timestamp[{kind.unit}]"
    return _name(field)


def _extension_name(field: pa.Field) -> str:
    if isinstance(field.type, pa.BaseExtensionType):
        return str(field.type.extension_name)
    return str((field.metadata or {}).get(_EXTENSION, b""), "utf-8", "replace")


def _family(element: str) -> str:
    """`date`, `time`, `timestamp`, `duration`, `decimal` or another word."""
    word = element.partition("[")[0].partition("(")[0]
    return word.rstrip("0123456789")


def _kind(element: str) -> str:
    """The kind of an element type in `_CASTS`."""
    if element in (*_INTEGERS, *_FLOATS, "bool"):
        return "number"
    if element in ("utf8", "binary"):
        return "text"
    family = _family(element)
    if family in _CALENDAR:
        return "calendar"
    return "bytes" if family == "fixed_size_binary" else family


def _plan_cast(field: pa.Field, wanted: pa.Field, declared: str) -> _Cast | None:
    """Plan a cast to a type that the server accepts; None if there is none without loss."""
    given, form = _form(field), _form(wanted)
    is_null = pa.types.is_null(given.leaf.type)
    is_tensor = isinstance(field.type, pa.FixedShapeTensorType)
    if "bfloat16" in (given.element, form.element):
        return None
    if not _fit(given.levels, form.levels) and not (is_null and not given.levels):
        return None
    if is_tensor and not given.is_plain:
        return None
    storage = pa.bool_() if given.leaf.type == pa.bool8() else _storage_of(given.leaf.type)
    source, leaf = _element(pa.field("", storage)), form.leaf.type
    if _admits(declared, source):
        leaf = storage
    elif not is_null and (_kind(source), _kind(form.element)) not in _CASTS:
        return None
    elif pa.types.is_timestamp(leaf) and pa.types.is_timestamp(storage):
        leaf = pa.timestamp(leaf.unit, storage.tz)
    target = _nested(form.levels, leaf)
    if is_tensor and given.levels == form.levels:
        target = pa.fixed_shape_tensor(leaf, field.type.shape)
    element = _element(pa.field("", leaf))
    is_checked = not is_null and source != element and not _is_exact(source, element)
    # An unsafe cast may give a decimal more digits than its precision.
    is_safe = not is_checked or pa.types.is_decimal(leaf)
    return _if_possible(_Cast(field.type, pa.field(field.name, target), is_checked, is_safe))


def _fit(given: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether lists can have the wanted sizes."""
    return len(given) == len(wanted) and all(
        left is None or right is None or left == right
        for left, right in zip(given, wanted, strict=True)
    )


def _is_exact(source: str, target: str) -> bool:
    """Whether a cast keeps every value or fails, so that no comparison is needed."""
    if target in _INTEGERS or (target in _FLOATS and source == "bool"):
        return _kind(source) in ("number", "decimal")
    if target in _FLOATS and source in _FLOATS:
        return _DIGITS[source] <= _DIGITS[target]
    if target in _FLOATS and source in _INTEGERS:
        return int(source.lstrip("uint")) <= _DIGITS[target]
    if _kind(target) == "calendar":
        return _family(target) == "timestamp"
    # Not decimals: pyarrow does not detect all that overflow.
    pair = (_kind(source), _kind(target))
    return pair in (("time", "time"), ("duration", "duration")) or _kind(target) == "text"


def _if_possible(cast: _Cast) -> _Cast | None:
    """Return a cast if pyarrow has it."""
    try:
        cast.convert(pa.nulls(0, cast.source))
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, _LossError):
        return None
    return cast


def _nested(levels: tuple[int | None, ...], leaf: Any) -> Any:  # noqa: ANN401
    """Return lists of a type by their sizes."""
    for size in reversed(levels):
        leaf = pa.list_(leaf) if size is None else pa.list_(leaf, size)
    return leaf


def _storage_of(kind: Any) -> Any:  # noqa: ANN401
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _plain(array: Any) -> Any:  # noqa: ANN401
    """Return an array without encoding and extension type, and list views as lists."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    elif pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    elif is_list_view(array.type):
        array = _lists(array)
    if array.type == pa.bool8():
        return array.storage.cast(pa.bool_())
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


def _lists(array: Any) -> Any:  # noqa: ANN401
    """Return list views as lists; pyarrow 26 casts them to invalid arrays."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)])
    return pa.LargeListArray.from_arrays(offsets, array.flatten(), mask=array.is_null())


def _cast(array: Any, target: Any, options: Mapping[str, bool]) -> Any:  # noqa: ANN401
    """Cast an array with options of pyarrow, in several steps where it has no cast."""
    source, wanted = _leaf(array.type), _leaf(target)
    step = None
    if pa.types.is_float16(source) and not pa.types.is_floating(wanted):
        step = pa.float32()
    elif pa.types.is_float16(wanted) and not pa.types.is_floating(source):
        step = pa.float64()
    elif pa.types.is_integer(source) and pa.types.is_decimal(wanted):
        step = _INTEGER_DECIMAL
    elif pa.types.is_decimal(source) and pa.types.is_floating(wanted):
        # The cast to a float does not give the nearest one.
        step = pa.utf8()
    if step is not None and step != wanted:
        array = _cast(array, _nested(_form(pa.field("", array.type)).levels, step), options)
    if options.keys() == {"safe"}:
        return array.cast(target, **options)
    return array.cast(options=pc.CastOptions(target, **options))


def _leaf(kind: Any) -> Any:  # noqa: ANN401
    return _form(pa.field("", kind)).leaf.type if kind.num_fields else kind


def _leaves(array: Any) -> Any:  # noqa: ANN401
    """Return the innermost values of an array."""
    for _ in _form(pa.field("", array.type)).levels:
        array = array.flatten()
    return array.cast(pa.float32()) if pa.types.is_float16(array.type) else array


def _equal(left: Any, right: Any) -> bool:  # noqa: ANN401
    """Whether arrays have equal values; NaN equals NaN."""
    same = pc.equal(left, right)
    if pc.all(same, min_count=0).as_py():
        return True
    if not pa.types.is_floating(left.type):
        return False
    both_nan = pc.and_(pc.is_nan(left), pc.is_nan(right))
    return bool(pc.all(pc.or_(same, both_nan), min_count=0).as_py())


def _first_lossy_row(cast: _Cast, array: Any) -> int:  # noqa: ANN401
    """Find the first row that a cast would change, by bisection."""
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


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """Return the most similar name, without regard to case."""
    by_lower = {each.lower(): each for each in names}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=1)
    return by_lower[found[0]] if found else None


def _hint(nearest: str | None) -> str:
    return f"; the nearest is `{nearest}`" if nearest else ""


def _name(field: pa.Field) -> str:
    """Name of a field's type in errors."""
    if _extension_name(field) == _BFLOAT16:
        return "bfloat16"
    return _ALIASES.get(str(field.type), str(field.type))


def _has_equal_fields(left: pa.Schema, right: pa.Schema) -> bool:
    """Whether schemas differ in their own metadata at most."""
    return bool(left.remove_metadata().equals(right.remove_metadata(), check_metadata=True))
