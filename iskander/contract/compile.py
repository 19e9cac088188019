"""Contract compilation: checks a manifest, or a derived one, against the model's graph.

Pure. Runs on: the worker that loaded the graph, and the operator's tool.
"""

from __future__ import annotations

import msgspec

from iskander.contract.column_types import RANK_MAX, ColumnType, parse_column_type, parse_sent_type
from iskander.contract.graph import Graph, GraphTensor, named_tensor, row_shape, supported_dtype
from iskander.contract.inputs import InputCompiler, is_tensor_as_sent, tensors_of
from iskander.contract.labels import Labels
from iskander.contract.manifest import InputColumn, Manifest, Passthrough
from iskander.contract.outputs import ColumnOrder, OutputColumn
from iskander.contract.processing.buckets import require_same_buckets
from iskander.contract.processing.postprocess import PostProcessing, compile_outputs, is_plain
from iskander.contract.tensors import STRING_BYTES, Contract, TensorSpec
from iskander.contract.validation import quoted, require, require_distinct, required, shape_text

BatchAxis = tuple[int | None, set[str]]
"""The fixed number of rows, if any, and the symbols of the batch axis."""


def derive_manifest(graph: Graph) -> Manifest:
    """Return a manifest for a graph without a manifest: each tensor is a column of its name.

    Raises:
        ManifestError: A tensor's type has no column type, or a trailing dimension is not fixed.
    """
    return Manifest(
        format=1,
        inputs=tuple(
            InputColumn(tensor=tensor.name, column=tensor.name, type=_derived_type(tensor, "input"))
            for tensor in graph.inputs
        ),
        outputs=tuple(
            OutputColumn(output.name, _derived_type(output, "output"), output.name)
            for output in graph.outputs
        ),
    )


def require_clear_rows(graph: Graph) -> None:
    """Require of a graph without a manifest that all its inputs have rows, or none.

    Beside a state of one row, the open axis of another input is often a sequence.

    Raises:
        ManifestError: The first axis of one input is open, and that of another is fixed at 1.
    """
    leading = {tensor.name: tensor.shape[0] for tensor in graph.inputs if tensor.shape}
    fixed = [name for name, size in leading.items() if size == 1]
    opened = [name for name, size in leading.items() if not isinstance(size, int)]
    require(
        not (fixed and opened),
        f"the first axis is open of {quoted(opened)}, and 1 of {quoted(fixed)}; if a row of a "
        "batch has one of each, write a manifest (`iskander manifest`): rows then run one at a "
        "time, and no state is kept between them",
    )


def declared_graph(manifest: Manifest) -> Graph:
    """Return the graph that `[graph]` declares, for a model whose files declare no tensors.

    A tensor without an entry has the type of its column.

    Raises:
        ManifestError: A type is unknown, or a tensor with post-processing has no entry.
    """
    inputs = {entry.tensor: entry.type for entry in manifest.inputs} | manifest.graph.inputs
    outputs = {entry.tensor: entry.type for entry in manifest.outputs if is_plain(entry)}
    outputs |= manifest.graph.outputs
    used = {source.tensor for entry in manifest.outputs for source in entry.sources}
    missing = quoted(sorted(used - set(outputs)))
    problem = f"the type of the tensors {missing} is not known: declare it in [graph] outputs"
    require(used <= set(outputs), problem)
    return Graph(_declared_tensors(inputs), _declared_tensors(outputs))


def compile_contract(
    manifest: Manifest | None,
    graph: Graph,
    string_bytes: int = STRING_BYTES,
    labels: Labels | None = None,
) -> Contract:
    """Compile a manifest, or one derived from the graph, into a contract.

    The manifest names every input of the graph. It may omit outputs; the model does not compute
    omitted outputs. `string_bytes` is the maximum of one string in a result.
    """
    if manifest is None:
        require_clear_rows(graph)
        manifest = derive_manifest(graph)
    require(bool(graph.inputs), "the graph has no inputs; a batch needs at least one")
    require(bool(manifest.outputs), "the manifest names no outputs")
    column_names = [entry.column for entry in manifest.inputs if entry.column is not None]
    require_distinct("column", column_names, "[[inputs]]")
    fed_tensors = [name for entry in manifest.inputs for name in tensors_of(entry)]
    require_distinct("tensor", fed_tensors, "[[inputs]]")
    columns = tuple(entry.column for entry in manifest.outputs)
    require_distinct("column", columns, "[[outputs]]")
    graph_inputs = {tensor.name: tensor for tensor in graph.inputs}
    graph_outputs = {tensor.name: tensor for tensor in graph.outputs}
    unnamed = [name for name in graph_inputs if name not in fed_tensors]
    require(not unnamed, f"the graph's inputs {quoted(unnamed)} are not in the manifest")

    rows_fixed, _ = axis = _batch_axis(graph.inputs)
    inputs, sources = _compile_inputs(manifest, graph_inputs)
    for output in manifest.outputs:
        tensor = graph_outputs.get(output.tensor)
        if is_plain(output) and not (tensor and tensor.element.startswith("seq(")):
            # The same error texts as for an input.
            _compile_spec(output.column, output.type, output.tensor, graph_outputs, "output")
    compiled = compile_outputs(manifest.outputs, graph, labels or {}, string_bytes)
    outputs = tuple(
        _result_spec(finish, compiled.is_plain, graph_outputs, axis) for finish in compiled.finishes
    )
    has_strings = any(spec.is_string for spec in (*inputs, *outputs))
    for spec in outputs:
        is_possible = spec.type.dtype_name != "bfloat16" or (not has_strings and compiled.is_plain)
        problem = "a graph with strings or of results with steps; the runtime cannot return both"
        require(is_possible, f"output `{spec.tensor}` is a tensor(bfloat16) of {problem}")
    _require_columns(manifest.columns, manifest.passthrough, columns)
    passthrough, order = manifest.passthrough, manifest.columns
    return Contract(inputs, outputs, passthrough, rows_fixed, compiled.columns, order, sources)


def _declared_tensors(types: dict[str, str]) -> tuple[GraphTensor, ...]:
    columns = [(name, parse_column_type(text)) for name, text in types.items()]
    return tuple(GraphTensor(n, kind.dtype.onnx, ("rows", *kind.shape)) for n, kind in columns)


def _result_spec(
    finish: PostProcessing, is_plain: bool, tensors: dict[str, GraphTensor], axis: BatchAxis
) -> TensorSpec:
    """Check the rows of a result; return its spec with `is_bound` set from the graph's shape.

    A graph may declare one row of a result beside any number of input rows, as LightGBM does for
    labels: the warm-up runs of the load then find out the number of rows.
    """
    spec, name, (rows_fixed, symbols) = finish.spec, finish.source.tensor, axis
    leading, *trailing = tensors[name].shape or (None,)
    may_be_wrong = leading == 1 and rows_fixed is None
    fits = not isinstance(leading, int) or leading == rows_fixed or may_be_wrong
    counts = f"always has {leading} rows and the inputs have {rows_fixed or 'any number'}"
    require(fits, f"output `{name}` {counts}: its rows cannot be assigned to requests")
    is_known = (leading in symbols or leading == rows_fixed) and leading is not None
    is_known = is_known and all(isinstance(size, int) for size in trailing)
    return msgspec.structs.replace(spec, is_bound=is_plain and is_known and not spec.is_string)


def _require_columns(
    order: ColumnOrder, passthrough: Passthrough, outputs: tuple[str, ...]
) -> None:
    """Check `passthrough`, and that `columns`, if it is a list, names each column once."""
    passed = passthrough if isinstance(passthrough, tuple) else ()
    require_distinct("column", passed, "passthrough")
    both = [name for name in outputs if name in passed]
    require(not both, f"columns {quoted(both)} are both passed through and produced")
    if not isinstance(order, tuple):
        return
    require(passthrough != "all", "`columns` names columns, so `passthrough` has to name them too")
    require_distinct("column", order, "columns")
    missing = [name for name in (*passed, *outputs) if name not in order]
    other = [name for name in order if name not in (*passed, *outputs)]
    require(not missing, f"`columns` does not name {quoted(missing)}")
    require(not other, f"`columns` names {quoted(other)}, neither produced nor passed through")
    produced = tuple(name for name in order if name in outputs)
    require(produced == outputs, "`columns` has the results in another order than [[outputs]]")


def _compile_inputs(
    manifest: Manifest, tensors: dict[str, GraphTensor]
) -> tuple[tuple[TensorSpec, ...], tuple[InputColumn, ...]]:
    specs, sources = [], []
    for entry in manifest.inputs:
        if is_tensor_as_sent(entry) and not entry.nullable:
            assert entry.column is not None
            sent = str(parse_sent_type(entry.type))
            specs.append(_compile_spec(entry.column, sent, entry.tensor, tensors, "input"))
            continue
        built = InputCompiler(entry, tensors).compile()
        specs += built.specs
        if built.source is not None:
            sources.append(built.source)
    require_distinct("column", [spec.column for spec in specs], "[[inputs]]")
    require_same_buckets(tuple(sources))
    return tuple(specs), tuple(sources)


def _batch_axis(tensors: tuple[GraphTensor, ...]) -> BatchAxis:
    for tensor in tensors:
        problem = "is a scalar; its first axis must be the rows of a batch"
        require(len(tensor.shape) > 0, f"input `{tensor.name}` {problem}")
    leading = [tensor.shape[0] for tensor in tensors]
    fixed = {size for size in leading if isinstance(size, int)}
    require(len(fixed) <= 1, f"the inputs have different fixed numbers of rows: {sorted(fixed)}")
    require(0 not in fixed, "an input has a batch axis fixed at 0 rows")
    return next(iter(fixed), None), {size for size in leading if isinstance(size, str)}


def _compile_spec(
    column: str, type_text: str, name: str, tensors: dict[str, GraphTensor], side: str
) -> TensorSpec:
    tensor = named_tensor(tensors, name, side)
    column_type, where = parse_column_type(type_text), f"{side} `{name}`"
    supported_dtype(tensor, where)
    is_same = column_type.dtype.onnx == tensor.element
    problem = f"is a {tensor.element} in the graph and `{type_text}` in the manifest"
    require(is_same, f"{where} {problem}")
    problem = f"{where} has the shape {shape_text(tensor.shape)} in the graph"
    problem += f" and `{type_text}` in the manifest"
    shape = required(row_shape(column_type.shape, tensor.shape[1:]), problem)
    return TensorSpec(column, name, column_type, shape)


def _derived_type(tensor: GraphTensor, side: str) -> str:
    where = f"{side} `{tensor.name}`"
    problem = "the manifest has to convert it to a column with `keys` or `sequence`"
    is_sequence = tensor.element.startswith("seq(")
    require(not is_sequence, f"{where} is a {tensor.element}; {problem}")
    dtype = supported_dtype(tensor, where)
    trailing = tensor.shape[1:]
    problem = f"has {len(trailing)} axes beside the rows, limit {RANK_MAX}"
    require(len(trailing) <= RANK_MAX, f"{where} {problem}")
    sizes = tuple(size for size in trailing if isinstance(size, int) and size > 0)
    problem = f"has the shape {shape_text(tensor.shape)}; a manifest has to fix its open axes"
    require(len(sizes) == len(trailing), f"{where} {problem}")
    return str(ColumnType(dtype.arrow, sizes))
