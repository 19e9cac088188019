"""What is done with the tensors of a graph until they are the results: decided when it is loaded.

    graph's tensors  ->  steps by row, labels  ->  tensors of the results  ->  columns of a batch
                         (worker: `iskander_worker.postprocess`)                 (gateway: Flight)

Pure. Every step says here what it makes of which elements and shape, so that what does not fit is
refused before the first request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from iskander.contract.column_types import ColumnType, parse_column_type
from iskander.contract.dtypes import BY_ARROW
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.outputs import OutputColumn, Source
from iskander.contract.result_types import (
    Leaf,
    ListOf,
    ResultType,
    StructOf,
    leaves_of,
    parse_result_type,
)
from iskander.contract.steps import (
    NUMBERS,
    Sizes,
    StepOutput,
    after,
    fetched,
    is_sequence,
    is_top_k,
    labelled,
    listed,
)
from iskander.contract.tensors import ResultColumn, TensorSpec
from iskander.errors import ManifestError

TOP_K_PARTS = ("label", "index", "score")
RESULTS_MAX = 4096
"""Tensors that a model may make, the parts of its lists and structs."""
LENGTH = "length"
"""The part of a list that says how many of its entries are meant."""


class PostProcessing(NamedTuple):
    """How one tensor of the results is made.

    Attributes:
        source: What of.
        raw: That as one tensor: its elements, and its shape as far as it is known.
        is_tensor: It is one already, and no sequence.
        part: Of what `top_k` makes: `label`, `index` or `score`; `length` of lists of a length of
            their own; else empty.
        labels: Take the place of the numbers at the end, unless they are empty.
        spec: What it has to become.
    """

    source: Source
    raw: StepOutput
    is_tensor: bool
    part: str
    labels: tuple[str, ...]
    spec: TensorSpec

    @property
    def is_plain(self) -> bool:
        """Whether it is the graph's tensor as it is."""
        is_graphs = self.is_tensor and self.spec.tensor == self.source.tensor
        return is_graphs and self.source == Source(self.source.tensor)


class Finished(NamedTuple):
    """All results of a model.

    Attributes:
        finishes: One for each tensor of the results, in their order.
        columns: As `Contract.columns`.
        is_plain: Each is a tensor of the graph as it is, so that the runtime can write it.
    """

    finishes: tuple[PostProcessing, ...]
    columns: tuple[ResultColumn, ...]
    is_plain: bool


def compile_outputs(
    entries: tuple[OutputColumn, ...],
    graph: Graph,
    labels: Mapping[str, tuple[str, ...]],
    string_bytes: int,
) -> Finished:
    """Hold the outputs of a manifest against a graph.

    Args:
        entries: Of the manifest, in the order of the columns.
        graph: What the model file declares.
        labels: Lines of each file of labels that is named.
        string_bytes: The most bytes of one string that the graph makes.

    Raises:
        ManifestError: What does not fit, naming the column, what was wanted and what was found.
    """
    tensors = {tensor.name: tensor for tensor in graph.outputs}
    finishes: list[PostProcessing] = []
    columns: list[ResultColumn] = []
    taken: set[str] = set()
    for entry in entries:
        first = len(finishes)
        _require_one_way(entry)
        if entry.rank is None:
            finishes += _finishes(entry, tensors, labels, string_bytes, taken)
        taken |= {finish.spec.tensor for finish in finishes[first:]}
        made = "; ".join(_in_words(source) for source in entry.sources)
        outputs = tuple(range(first, len(finishes)))
        kind = str(parse_result_type(entry.type) or parse_column_type(entry.type))
        columns.append(ResultColumn(entry.column, kind, outputs, made))
    names = [finish.spec.tensor for finish in finishes]
    if len(names) > RESULTS_MAX:
        raise ManifestError(f"a model may have {RESULTS_MAX} results, got {len(names)}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ManifestError(
            f"two results would be the tensor {_quoted(twice)}; rename one of the columns"
        )
    columns = [
        column if entry.rank is None else _ranked(entry, column, columns, finishes)
        for entry, column in zip(entries, columns, strict=True)
    ]
    sources = [finish.source.tensor for finish in finishes]
    is_plain = all(finish.is_plain for finish in finishes) and len({*sources}) == len(sources)
    is_usual = is_plain and all(
        column.rank is None and parse_result_type(column.type) is None for column in columns
    )
    return Finished(tuple(finishes), () if is_usual else tuple(columns), is_plain)


def is_plain(entry: OutputColumn) -> bool:
    """Whether a column is one tensor of the graph, with nothing done to it."""
    is_one = bool(entry.tensor) and not entry.fields and entry.rank is None
    return is_one and entry.source == Source(entry.tensor) and parse_result_type(entry.type) is None


def _require_one_way(entry: OutputColumn) -> None:
    ways = [bool(entry.tensor), bool(entry.fields), entry.rank is not None]
    if sum(ways) != 1:
        raise ManifestError(
            f"output column `{entry.column}` has to have one of `tensor`, `fields` and `rank`, "
            f"and has {sum(ways)}"
        )
    if not entry.tensor and entry.source != Source(""):
        raise ManifestError(
            f"output column `{entry.column}` has no `tensor` of its own, which its keys are about"
        )


def _finishes(
    entry: OutputColumn,
    tensors: dict[str, GraphTensor],
    labels: Mapping[str, tuple[str, ...]],
    string_bytes: int,
    taken: set[str],
) -> list[PostProcessing]:
    """The tensors that one column is made of."""
    kind = parse_result_type(entry.type)
    if kind is None:
        column_type = parse_column_type(entry.type)
        leaves = [Leaf((), column_type.dtype_name, column_type.shape)]
    else:
        column_type = None
        leaves = leaves_of(kind)
    is_top = bool(entry.tensor) and any(is_top_k(step) for step in entry.post)
    paths = [".".join(leaf.path) for leaf in leaves]
    if is_top:
        if not {*paths} <= {*TOP_K_PARTS}:
            raise ManifestError(
                f"output column `{entry.column}`: top_k makes lists of structs with fields of the "
                f"names {', '.join(TOP_K_PARTS)}, and `{entry.type}` has {_quoted(paths)}"
            )
    elif entry.fields and ({*paths} != {*entry.fields} or not any(paths)):
        raise ManifestError(
            f"output column `{entry.column}`: `fields` are {_quoted(list(entry.fields))} and "
            f"`{entry.type}` has {_quoted(paths)}"
        )
    elif not entry.fields and any(paths):
        raise ManifestError(
            f"output column `{entry.column}` is a struct: name the tensor of each field in `fields`"
        )
    made = []
    for leaf, path in zip(leaves, paths, strict=True):
        source = entry.fields[path] if entry.fields else entry.source
        where = f"output column `{entry.column}`" + (f", field `{path}`" if path else "")
        is_own = source == Source(source.tensor) and source.tensor not in taken and not path
        name = ".".join((entry.column, *leaf.path))
        finish = _finish(
            where,
            source,
            leaf,
            part=path if is_top else "",
            tensors=tensors,
            labels=labels,
            string_bytes=string_bytes,
        )
        spec = msgspec.structs.replace(
            finish.spec, column=name, tensor=source.tensor if is_own else name
        )
        if column_type is not None and column_type.is_tensor:
            spec = msgspec.structs.replace(spec, type=column_type)
        made.append(finish._replace(spec=spec))
    if entry.source.is_ragged and len(made) == 1:
        name = f"{entry.column}.{LENGTH}"
        length = TensorSpec(name, name, ColumnType("int32"), (), is_bound=False)
        made.append(made[0]._replace(part=LENGTH, labels=(), spec=length))
    elif kind is not None:
        _require_even(entry.column, kind, [finish.spec.shape for finish in made], 0)
    return made


def _require_even(column: str, kind: ResultType, shapes: list[tuple[int, ...]], depth: int) -> None:
    """Refuse a list whose parts do not have as many entries.

    Args:
        column: Of results.
        kind: Of it, or of a part of it.
        shapes: Of a row of each of its leaves.
        depth: Lists around it.
    """
    if isinstance(kind, StructOf):
        first = 0
        for _, field in kind.fields:
            count = len(leaves_of(field))
            _require_even(column, field, shapes[first : first + count], depth)
            first += count
    elif isinstance(kind, ListOf):
        lengths = {shape[depth] for shape in shapes}
        if len(lengths) > 1:
            raise ManifestError(
                f"output column `{column}` has a list whose parts are tensors of different "
                f"lengths: {', '.join(map(str, sorted(lengths)))}"
            )
        _require_even(column, kind.item, shapes, depth + 1)


def _finish(
    where: str,
    source: Source,
    leaf: Leaf,
    *,
    part: str,
    tensors: dict[str, GraphTensor],
    labels: Mapping[str, tuple[str, ...]],
    string_bytes: int,
) -> PostProcessing:
    """One tensor of the results, still without its name."""
    graph_tensor = tensors.get(source.tensor)
    if graph_tensor is None:
        raise ManifestError(
            f"output tensor `{source.tensor}` is not in the graph, which has "
            f"{_quoted(list(tensors))}"
        )
    raw = made = fetched(where, source, graph_tensor, leaf.sizes)
    axes = 2 if source.is_ragged else 1
    sizes = leaf.sizes
    if source.is_ragged:
        _require_list(where, source, leaf, tensors)
        sizes = (source.list_max, *leaf.sizes[1:])
    for step in source.post:
        made = after(where, step, made, axes)
    lines: tuple[str, ...] = ()
    if part in ("label", "index"):
        made = made._replace(dtype_name="int64")
    if source.labels and part in ("", "label"):
        lines = labels[source.labels]
        made = labelled(where, source, raw, made, leaf.dtype_name, len(lines))
    elif part == "label":
        raise ManifestError(f"{where}: its labels have to come from a file, named by `labels`")
    elif made.is_top and not part:
        raise ManifestError(f"{where}: top_k makes a struct; its type has to have one")
    is_graphs = not source.post and not lines
    if made.dtype_name != leaf.dtype_name and not (
        is_graphs and {made.dtype_name, leaf.dtype_name} == {"utf8", "binary"}
    ):
        raise ManifestError(
            f"{where} is {made.dtype_name} {listed(made.shape[1:])} when all is done, and its "
            f"type says {leaf.dtype_name}"
        )
    shape = _shape(where, made.shape[1:], sizes)
    room = max(map(len, map(str.encode, lines))) if lines else string_bytes
    dtype = BY_ARROW[leaf.dtype_name]
    column_shape = shape if leaf.sizes else ()
    return PostProcessing(
        source,
        raw,
        not is_sequence(graph_tensor),
        part,
        lines,
        TensorSpec(
            "",
            "",
            ColumnType(leaf.dtype_name, column_shape),
            shape,
            is_bound=False,
            string_bytes=0 if dtype.arrow_bits else max(room, 1),
        ),
    )


def _require_list(where: str, source: Source, leaf: Leaf, tensors: dict[str, GraphTensor]) -> None:
    """Refuse a length of its own for what is no list, and lengths that cannot be."""
    if leaf.path or not leaf.sizes or leaf.sizes[0] is not None:
        raise ManifestError(f"{where}: list_max and lengths are for a column `list<...>`")
    if source.sequence == "columns" or any(is_top_k(step) for step in source.post):
        raise ManifestError(
            f"{where}: a sequence of columns and top_k have as many entries for each row, and no "
            "list_max or lengths"
        )
    if source.lengths:
        found = tensors.get(source.lengths)
        if found is None or found.element not in ("tensor(int32)", "tensor(int64)"):
            raise ManifestError(
                f"{where}: lengths `{source.lengths}` has to be an output of the graph with an "
                "int32 or int64 for each row"
            )


def _shape(where: str, made: Sizes, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a row: what the type says, held against what the graph and the steps make."""
    if not sizes and all(size == 1 for size in made):
        sizes = made
    shape = []
    fits = len(made) == len(sizes)
    for got, wanted in zip(made, sizes, strict=False):
        size = got if wanted is None else wanted
        fits = fits and size is not None and got in (None, size)
        shape.append(size or 0)
    if not fits:
        raise ManifestError(
            f"{where} has rows of the shape {listed(made)}, and its type has {listed(sizes)}"
        )
    return tuple(shape)


def _ranked(
    entry: OutputColumn,
    column: ResultColumn,
    columns: list[ResultColumn],
    finishes: list[PostProcessing],
) -> ResultColumn:
    """The column of a rank, once it is known what it ranks by."""
    assert entry.rank is not None
    where = f"output column `{entry.column}`"
    if column.type != "int32":
        raise ManifestError(f"{where}: a rank is an int32, and its type says `{column.type}`")
    by = next((each for each in columns if each.column == entry.rank.of), None)
    specs = [finishes[index].spec for index in by.outputs] if by is not None else []
    if len(specs) != 1 or specs[0].elements != 1 or specs[0].type.dtype_name not in NUMBERS:
        raise ManifestError(
            f"{where} ranks by `{entry.rank.of}`, which has to be an output column with one number "
            "a row"
        )
    within = f" within {entry.rank.within}" if entry.rank.within else ""
    made = f"rank of {entry.rank.of}{within}, {entry.rank.order}"
    assert by is not None
    return ResultColumn(column.column, column.type, by.outputs, made, entry.rank)


def _in_words(source: Source) -> str:
    """A source for people: where it comes from and what is done."""
    words = [source.tensor]
    if source.keys:
        words.append(f"keys {', '.join(map(str, source.keys))}")
    words += [step if isinstance(step, str) else str(step) for step in source.post]
    if source.lengths:
        words.append(f"lengths {source.lengths}")
    if source.labels:
        words.append(f"labels {source.labels}")
    return ", ".join(words)


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
