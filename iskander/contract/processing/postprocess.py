"""Compilation of `[[outputs]]`: types and shapes of results after each post-processing step.

    graph's tensors  ->  steps by row, labels  ->  tensors of the results  ->  columns of a batch
                         (worker: `batches.postprocess`)                         (gateway: Flight)

Pure. A step that does not fit its tensor is an error at load time, before the first request.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from iskander.contract.column_types import ColumnType, parse_column_type
from iskander.contract.graph import Graph, GraphTensor, named_tensor
from iskander.contract.labels import Labels
from iskander.contract.outputs import OutputColumn, OutputSource
from iskander.contract.processing import steps
from iskander.contract.result_types import (
    Leaf,
    ListOf,
    ResultType,
    StructOf,
    leaves_of,
    parse_result_type,
)
from iskander.contract.tensors import ResultColumn, TensorSpec
from iskander.contract.validation import quoted, repeated, require, shape_text

TOP_K_PARTS = ("label", "index", "score")
RESULTS_MAX = 4096
"""Result tensors of a model, including the parts of lists and structs."""
LENGTH = "length"
"""The part of a list with the number of its valid entries."""


class PostProcessing(NamedTuple):
    """Computation of one result tensor.

    Attributes:
        source: The graph's tensor and its post-processing steps.
        raw: Element type and known shape of the source as one tensor, before any step.
        is_tensor: Whether the source is a tensor, not a sequence.
        part: Part of a `top_k` result: `label`, `index` or `score`; `length` for lists of variable
            length; else empty.
        labels: Labels that replace the numbers after the last step; empty: the numbers stay.
        spec: Name, type and shape of the result.
    """

    source: OutputSource
    raw: steps.StepOutput
    is_tensor: bool
    part: str
    labels: tuple[str, ...]
    spec: TensorSpec

    @property
    def is_plain(self) -> bool:
        """Whether the result is the graph's tensor without post-processing."""
        is_same = self.is_tensor and self.spec.tensor == self.source.tensor
        return is_same and self.source == OutputSource(self.source.tensor)


class CompiledOutputs(NamedTuple):
    """All results of a model, by tensor and by column as in `Contract.columns`.

    `is_plain`: no result has post-processing, so the runtime can write all of them.
    """

    finishes: tuple[PostProcessing, ...]
    columns: tuple[ResultColumn, ...]
    is_plain: bool


def compile_outputs(
    entries: tuple[OutputColumn, ...], graph: Graph, labels: Labels, string_bytes: int
) -> CompiledOutputs:
    """Compile the outputs of a manifest for a graph with strings of up to `string_bytes`."""
    compiler = _OutputCompiler(graph, labels, string_bytes)
    for entry in entries:
        compiler.add(entry)
    finishes, columns = compiler.finishes, compiler.columns
    count = len(finishes)
    require(count <= RESULTS_MAX, f"the model has {count} result tensors, limit {RESULTS_MAX}")
    twice = repeated(finish.spec.tensor for finish in finishes)
    problem = f"two results would be the tensor {quoted(twice)}; rename one of the columns"
    require(not twice, problem)
    columns = [
        column if entry.rank is None else compiler.complete_rank(entry, column)
        for entry, column in zip(entries, columns, strict=True)
    ]
    sources = [finish.source.tensor for finish in finishes]
    is_plain = all(finish.is_plain for finish in finishes) and len({*sources}) == len(sources)
    is_one_to_one = is_plain and not any(column.is_assembled for column in columns)
    return CompiledOutputs(tuple(finishes), () if is_one_to_one else tuple(columns), is_plain)


def is_plain(entry: OutputColumn) -> bool:
    """Return whether a column is one tensor of the graph without post-processing."""
    is_one = bool(entry.tensor) and not entry.fields and entry.rank is None
    return (
        is_one
        and entry.source == OutputSource(entry.tensor)
        and parse_result_type(entry.type) is None
    )


class _OutputCompiler:
    """Compiles output columns one by one into `finishes` and `columns`."""

    def __init__(self, graph: Graph, labels: Labels, string_bytes: int) -> None:
        self.tensors = {tensor.name: tensor for tensor in graph.outputs}
        self.labels = labels
        self.string_bytes = string_bytes
        self.finishes: list[PostProcessing] = []
        self.columns: list[ResultColumn] = []
        self.used: set[str] = set()

    def add(self, entry: OutputColumn) -> None:
        """Compile one column; `complete_rank` completes a rank when all columns are known."""
        where = f"output column `{entry.column}`"
        ways = bool(entry.tensor) + bool(entry.fields) + (entry.rank is not None)
        problem = f"needs exactly one of `tensor`, `fields` and `rank`, and has {ways}"
        require(ways == 1, f"{where} {problem}")
        is_consistent = bool(entry.tensor) or entry.source == OutputSource("")
        require(is_consistent, f"{where} has no `tensor`, which its other keys need")
        first = len(self.finishes)
        kind = parse_result_type(entry.type) or parse_column_type(entry.type)
        if entry.rank is None:
            self.finishes += self._compile_tensors(entry, where, kind)
        self.used |= {finish.spec.tensor for finish in self.finishes[first:]}
        description = "; ".join(_describe(source) for source in entry.sources)
        outputs = tuple(range(first, len(self.finishes)))
        self.columns.append(ResultColumn(entry.column, str(kind), outputs, description))

    def _compile_tensors(
        self, entry: OutputColumn, column: str, kind: ResultType | ColumnType
    ) -> list[PostProcessing]:
        """Compile the tensors of one column."""
        leaves = leaves_of(kind)
        is_top = bool(entry.tensor) and any(steps.is_top_k(step) for step in entry.post)
        paths = [".".join(leaf.path) for leaf in leaves]
        of_type = f"and `{entry.type}` has {quoted(paths)}"
        if is_top:
            parts = f"lists of structs with the fields {', '.join(TOP_K_PARTS)}"
            require({*paths} <= {*TOP_K_PARTS}, f"{column}: top_k makes {parts}, {of_type}")
        elif entry.fields:
            is_same = {*paths} == {*entry.fields} and any(paths)
            require(is_same, f"{column}: `fields` are {quoted(entry.fields)} {of_type}")
        else:
            problem = "is a struct: name the tensor of each field in `fields`"
            require(not any(paths), f"{column} {problem}")
        results = []
        for leaf, path in zip(leaves, paths, strict=True):
            source = entry.fields[path] if entry.fields else entry.source
            where = column + (f", field `{path}`" if path else "")
            is_own = source == OutputSource(source.tensor) and not path
            is_own = is_own and source.tensor not in self.used
            name = ".".join((entry.column, *leaf.path))
            finish = self._compile_tensor(where, source, leaf, path if is_top else "")
            tensor = source.tensor if is_own else name
            spec = msgspec.structs.replace(finish.spec, column=name, tensor=tensor)
            if isinstance(kind, ColumnType) and kind.is_tensor:
                spec = msgspec.structs.replace(spec, type=kind)
            results.append(finish._replace(spec=spec))
        if entry.source.is_ragged and len(results) == 1:
            name = f"{entry.column}.{LENGTH}"
            length = TensorSpec(name, name, ColumnType("int32"), (), is_bound=False)
            results.append(results[0]._replace(part=LENGTH, labels=(), spec=length))
        elif not isinstance(kind, ColumnType):
            _require_equal_lengths(entry.column, kind, [finish.spec.shape for finish in results], 0)
        return results

    def _compile_tensor(
        self, where: str, source: OutputSource, leaf: Leaf, part: str
    ) -> PostProcessing:
        """Compile one result tensor, without its name."""
        graph_tensor = named_tensor(self.tensors, source.tensor, "output")
        raw = output = steps.source_tensor(where, source, graph_tensor, leaf.sizes)
        axes = 2 if source.is_ragged else 1
        sizes = leaf.sizes
        if source.is_ragged:
            _require_list(where, source, leaf, self.tensors)
            sizes = (source.list_max, *leaf.sizes[1:])
        for step in source.post:
            output = steps.apply_step(where, step, output, axes)
        lines: tuple[str, ...] = ()
        if part in ("label", "index"):
            output = output._replace(dtype_name="int64")
        if source.labels and part in ("", "label"):
            lines = self.labels[source.labels]
            output = steps.apply_labels(where, source, raw, output, leaf.dtype_name, len(lines))
        else:
            require(part != "label", f"{where}: set `labels` to a file with the labels")
            has_part = bool(part) or not output.is_top
            require(has_part, f"{where}: top_k makes a struct; its type has to be one")
        are_strings = {output.dtype_name, leaf.dtype_name} == {"utf8", "binary"}
        is_unchanged = not source.post and not lines
        is_same = output.dtype_name == leaf.dtype_name or (is_unchanged and are_strings)
        got = f"{output.dtype_name} {shape_text(output.shape[1:])} after all steps"
        require(is_same, f"{where} is {got}, and its type is {leaf.dtype_name}")
        shape = _row_shape(where, output.shape[1:], sizes)
        longest = max(len(line.encode()) for line in lines) if lines else self.string_bytes
        column_type = ColumnType(leaf.dtype_name, shape if leaf.sizes else ())
        string_bytes = 0 if column_type.dtype.arrow_bits else max(longest, 1)
        spec = TensorSpec("", "", column_type, shape, is_bound=False, string_bytes=string_bytes)
        return PostProcessing(source, raw, not steps.is_sequence(graph_tensor), part, lines, spec)

    def complete_rank(self, entry: OutputColumn, column: ResultColumn) -> ResultColumn:
        """Return the column of a rank, with the output by whose values it ranks."""
        rank, where = entry.rank, f"output column `{entry.column}`"
        assert rank is not None
        got = f"its type is `{column.type}`"
        require(column.type == "int32", f"{where}: a rank is an int32, and {got}")
        outputs = next(
            (compiled.outputs for compiled in self.columns if compiled.column == rank.of), ()
        )
        specs = [self.finishes[index].spec for index in outputs]
        problem = "has to be an output column with one number a row"
        is_one = len(specs) == 1 and specs[0].elements == 1
        is_number = is_one and specs[0].type.dtype_name in steps.NUMBERS
        require(is_number, f"{where} ranks by `{rank.of}`, which {problem}")
        within = f" within {rank.within}" if rank.within else ""
        description = f"rank of {rank.of}{within}, {rank.order}"
        return ResultColumn(column.column, column.type, outputs, description, rank)


def _require_equal_lengths(
    column: str, kind: ResultType, shapes: list[tuple[int, ...]], depth: int
) -> None:
    """Reject a list whose parts differ in length.

    `shapes` are the row shapes of the leaves of `kind`; `depth` lists enclose `kind`.
    """
    if isinstance(kind, StructOf):
        first = 0
        for _, field in kind.fields:
            count = len(leaves_of(field))
            _require_equal_lengths(column, field, shapes[first : first + count], depth)
            first += count
    elif isinstance(kind, ListOf):
        lengths = sorted({shape[depth] for shape in shapes})
        parts = f"a list whose parts are tensors of different lengths: {str(lengths)[1:-1]}"
        require(len(lengths) <= 1, f"output column `{column}` has {parts}")
        _require_equal_lengths(column, kind.item, shapes, depth + 1)


def _require_list(
    where: str, source: OutputSource, leaf: Leaf, tensors: dict[str, GraphTensor]
) -> None:
    """Allow `list_max` and `lengths` only for lists of variable length."""
    is_list = not leaf.path and leaf.sizes and leaf.sizes[0] is None
    require(bool(is_list), f"{where}: list_max and lengths are for a column `list<...>`")
    is_fixed = source.sequence == "columns" or any(steps.is_top_k(step) for step in source.post)
    problem = "a sequence of columns, or top_k, has fixed lengths, and no list_max or lengths"
    require(not is_fixed, f"{where}: {problem}")
    found = tensors.get(source.lengths)
    fits = found is not None and found.element in ("tensor(int32)", "tensor(int64)")
    problem = "has to be an output of the graph with an int32 or int64 for each row"
    require(fits or not source.lengths, f"{where}: lengths `{source.lengths}` {problem}")


def _row_shape(where: str, computed: steps.Sizes, sizes: steps.Sizes) -> tuple[int, ...]:
    """Return the shape of a row, from the column's type, the graph and the steps."""
    if not sizes and all(size == 1 for size in computed):
        sizes = computed
    shape = []
    fits = len(computed) == len(sizes)
    for got, declared in zip(computed, sizes, strict=False):
        size = got if declared is None else declared
        fits = fits and size is not None and got in (None, size)
        shape.append(size or 0)
    problem = f"rows of the shape {shape_text(computed)}, and its type has {shape_text(sizes)}"
    require(fits, f"{where} has {problem}")
    return tuple(shape)


def _describe(source: OutputSource) -> str:
    """Describe a source for people: its tensor and steps."""
    words = [source.tensor]
    if source.keys:
        words.append(f"keys {', '.join(map(str, source.keys))}")
    words += map(str, source.post)
    if source.lengths:
        words.append(f"lengths {source.lengths}")
    if source.labels:
        words.append(f"labels {source.labels}")
    return ", ".join(words)
