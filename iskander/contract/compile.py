"""A manifest (or none) held against a graph: do they fit together, and what is the contract.

Decided once, when a model is loaded. Pure; runs in the worker that loaded the graph and in the
operator's tool.
"""

from __future__ import annotations

import msgspec

from iskander.contract.buckets import require_one_set
from iskander.contract.column_types import RANK_MAX, ColumnType, parse_column_type, parse_sent_type
from iskander.contract.dtypes import BY_ONNX
from iskander.contract.graph import Dimension, Graph, GraphTensor
from iskander.contract.inputs import compile_input, is_tensor_as_sent, tensors_of
from iskander.contract.labels import Labels
from iskander.contract.manifest import InputColumn, Manifest, Passthrough
from iskander.contract.outputs import ColumnOrder, OutputColumn
from iskander.contract.postprocess import PostProcessing, compile_outputs, is_plain
from iskander.contract.tensors import STRING_BYTES, Contract, TensorSpec
from iskander.errors import ManifestError


def derive_manifest(graph: Graph) -> Manifest:
    """The manifest of a graph that has none: a column for each tensor, under the tensor's name.

    Raises:
        ManifestError: A tensor's type has no column type, or a trailing dimension is not fixed.
    """
    return Manifest(
        format=1,
        inputs=tuple(
            InputColumn(column=tensor.name, type=_derived_type(tensor, "input"), tensor=tensor.name)
            for tensor in graph.inputs
        ),
        outputs=tuple(
            OutputColumn(
                tensor=tensor.name, column=tensor.name, type=_derived_type(tensor, "output")
            )
            for tensor in graph.outputs
        ),
    )


def compile_contract(
    manifest: Manifest | None,
    graph: Graph,
    string_bytes: int = STRING_BYTES,
    labels: Labels | None = None,
) -> Contract:
    """Hold a manifest against a graph.

    Outputs of the graph that the manifest leaves out are not computed for the caller; every input
    of the graph must be named.

    Args:
        manifest: None to derive it from the graph.
        graph: What the model file declares.
        string_bytes: The most bytes of one string in a result.
        labels: Lines of each file of labels that the manifest names.

    Raises:
        ManifestError: What does not fit, naming the tensor, what was wanted and what was found.
    """
    manifest = manifest or derive_manifest(graph)
    _require(bool(graph.inputs), "the graph has no inputs, so a batch of rows means nothing to it")
    _require(bool(manifest.outputs), "the manifest names no outputs")
    named = [entry.column for entry in manifest.inputs if entry.column is not None]
    _require_distinct("column", named, "[[inputs]]")
    fed = [name for entry in manifest.inputs for name in tensors_of(entry)]
    _require_distinct("tensor", fed, "[[inputs]]")
    _require_distinct("column", [entry.column for entry in manifest.outputs], "[[outputs]]")
    graph_inputs = {tensor.name: tensor for tensor in graph.inputs}
    graph_outputs = {tensor.name: tensor for tensor in graph.outputs}
    unnamed = [name for name in graph_inputs if name not in fed]
    _require(not unnamed, f"the graph's inputs {_quoted(unnamed)} are not in the manifest")

    rows_fixed, symbols = _batch_axis(graph.inputs)
    inputs, sources = _compile_inputs(manifest, graph_inputs)
    for output in manifest.outputs:
        tensor = graph_outputs.get(output.tensor)
        if is_plain(output) and not (tensor and tensor.element.startswith("seq(")):
            # In the words of an input.
            _compile_spec(output.column, output.type, output.tensor, graph_outputs, "output")
    finished = compile_outputs(manifest.outputs, graph, labels or {}, string_bytes)
    outputs = tuple(
        _output(finish, finished.is_plain, graph_outputs, rows_fixed, symbols)
        for finish in finished.finishes
    )
    has_strings = any(spec.is_string for spec in (*inputs, *outputs))
    for spec in outputs:
        _require(
            spec.type.dtype_name != "bfloat16" or (not has_strings and finished.is_plain),
            f"output `{spec.tensor}` is a tensor(bfloat16) of a graph with strings or of results "
            "with steps; the runtime cannot return both",
        )
    passthrough = manifest.passthrough
    if isinstance(passthrough, tuple):
        _require_distinct("column", list(passthrough), "passthrough")
        both = [entry.column for entry in manifest.outputs if entry.column in passthrough]
        _require(not both, f"columns {_quoted(both)} are both passed through and produced")
    columns = tuple(column.column for column in manifest.outputs)
    _require_order(manifest.columns, passthrough, columns)
    return Contract(
        inputs, outputs, passthrough, rows_fixed, finished.columns, manifest.columns, sources
    )


def _output(
    finish: PostProcessing,
    is_plain: bool,
    graph_outputs: dict[str, GraphTensor],
    rows_fixed: int | None,
    symbols: set[Dimension],
) -> TensorSpec:
    """A tensor of the results, with what is known of its rows."""
    spec, name = finish.spec, finish.source.tensor
    leading, *trailing = graph_outputs[name].shape or (None,)
    if isinstance(leading, int):
        _require(
            leading == rows_fixed,
            f"output `{name}` always has {leading} rows and the inputs have "
            f"{rows_fixed or 'any number'}: its rows cannot be told apart by caller",
        )
    is_known = (leading in symbols or leading == rows_fixed) and leading is not None
    is_known = is_known and all(isinstance(size, int) for size in trailing)
    return msgspec.structs.replace(spec, is_bound=is_plain and is_known and not spec.is_string)


def _require_order(order: ColumnOrder, passthrough: Passthrough, outputs: tuple[str, ...]) -> None:
    """An order that names the columns names all that can be in a response, each once."""
    if not isinstance(order, tuple):
        return
    _require(passthrough != "all", "`columns` names columns, so `passthrough` has to name them too")
    _require_distinct("column", list(order), "columns")
    passed = passthrough if isinstance(passthrough, tuple) else ()
    missing = [name for name in (*passed, *outputs) if name not in order]
    other = [name for name in order if name not in (*passed, *outputs)]
    _require(not missing, f"`columns` does not name {_quoted(missing)}")
    _require(not other, f"`columns` names {_quoted(other)}, neither made nor passed through")
    made = tuple(name for name in order if name in outputs)
    _require(made == outputs, "`columns` has the results in another order than [[outputs]]")


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
        made = compile_input(entry, tensors)
        specs += made.specs
        if made.source is not None:
            sources.append(made.source)
    _require_distinct("column", [spec.column for spec in specs], "[[inputs]]")
    require_one_set(tuple(sources))
    return tuple(specs), tuple(sources)


def _batch_axis(tensors: tuple[GraphTensor, ...]) -> tuple[int | None, set[Dimension]]:
    for tensor in tensors:
        _require(
            len(tensor.shape) > 0,
            f"input `{tensor.name}` is a scalar; its first axis must be the rows of a batch",
        )
    leading = [tensor.shape[0] for tensor in tensors]
    fixed = {size for size in leading if isinstance(size, int)}
    _require(
        len(fixed) <= 1,
        f"the inputs have different fixed numbers of rows: {sorted(fixed)}",
    )
    _require(0 not in fixed, "an input has a batch axis fixed at 0 rows")
    return next(iter(fixed), None), {size for size in leading if isinstance(size, str)}


def _compile_spec(
    column: str, type_text: str, name: str, tensors: dict[str, GraphTensor], side: str
) -> TensorSpec:
    tensor = tensors.get(name)
    _require(
        tensor is not None,
        f"{side} tensor `{name}` is not in the graph, which has {_quoted(list(tensors))}",
    )
    assert tensor is not None
    column_type = parse_column_type(type_text)
    dtype = BY_ONNX.get(tensor.element)
    _require(
        dtype is not None,
        f"{side} `{name}` is a {tensor.element}, which is not supported; supported are "
        f"{', '.join(BY_ONNX)}",
    )
    _require(
        column_type.dtype.onnx == tensor.element,
        f"{side} `{name}` is a {tensor.element} in the graph and `{type_text}` in the manifest",
    )
    _require(len(tensor.shape) > 0, f"{side} `{name}` is a scalar and has no axis for rows")
    trailing = tensor.shape[1:]
    shape = column_type.shape
    if not shape and all(size == 1 for size in trailing):
        shape = (1,) * len(trailing)
    fits = len(shape) == len(trailing) and all(
        not isinstance(wanted, int) or wanted == got
        for wanted, got in zip(trailing, shape, strict=True)
    )
    _require(
        fits,
        f"{side} `{name}` has the shape {_shape_text(tensor)} in the graph and `{type_text}` "
        "in the manifest",
    )
    return TensorSpec(column, name, column_type, shape)


def _derived_type(tensor: GraphTensor, side: str) -> str:
    _require(
        not tensor.element.startswith("seq("),
        f"{side} `{tensor.name}` is a {tensor.element}, which is a column where a manifest says "
        "how: `keys` of maps, `sequence` of tensors",
    )
    dtype = BY_ONNX.get(tensor.element)
    _require(
        dtype is not None,
        f"{side} `{tensor.name}` is a {tensor.element}, which is not supported; supported are "
        f"{', '.join(BY_ONNX)}",
    )
    assert dtype is not None
    _require(
        len(tensor.shape) > 0,
        f"{side} `{tensor.name}` is a scalar and has no axis for the rows of a batch",
    )
    trailing = tensor.shape[1:]
    _require(
        len(trailing) <= RANK_MAX,
        f"{side} `{tensor.name}` has {len(trailing)} axes beside the rows, at most {RANK_MAX} are "
        "supported",
    )
    _require(
        all(isinstance(size, int) and size > 0 for size in trailing),
        f"{side} `{tensor.name}` has the shape {_shape_text(tensor)}: only the first axis may be "
        "open; a manifest can declare the others",
    )
    return str(ColumnType(dtype.arrow, tuple(size for size in trailing if isinstance(size, int))))


def _shape_text(tensor: GraphTensor) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in tensor.shape) + "]"


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _require_distinct(what: str, names: list[str], where: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    _require(not twice, f"{where} names the {what} {_quoted(twice)} twice")


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise ManifestError(message)
