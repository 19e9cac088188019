"""Manifest of a model version: its declaration, and the reader of `manifest.toml`.

Runs on: the worker that loads the model, and the operator's tool. The gateway opens no model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from iskander.contract.backend_manifest import (
    GraphSection,
    PythonSection,
    RemoteSection,
    Steps,
    TorchSection,
)
from iskander.contract.outputs import ColumnOrder, OutputColumn
from iskander.contract.paths import existing_inside, read_plain
from iskander.contract.validation import require
from iskander.errors import ManifestError
from iskander.foundation.decoders import thread_safe

MANIFEST_BYTES_MAX = 1 << 20
COLUMNS_MAX = 4096
"""Maximum number of columns of one tensor."""
LENGTH_MAX = 1 << 20
"""Maximum number of elements of one row of a list."""
BUCKETS_MAX = 16

Passthrough = Literal["all", "none"] | tuple[str, ...]
Unit = Literal["ns", "us", "ms", "s", "m", "h", "d"]
Value = bool | int | float | str


class InputColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`[[inputs]]` of a manifest: the columns of a tensor, and their conversion.

    The page `docs/models.md` explains the keys; `contract.inputs` checks them against the graph.

    Attributes:
        tensor: Input of the graph.
        column: Column of the batch; `a.b` is a field of a struct.
        columns: Columns, packed into the tensor's last axis in this order.
        type: Type of the sent column; by default the tensor's own.
        nullable: Older form of `nulls`; `true` also requires `nulls`.
        nulls: Replacement of a null; by default a null is an error.
        fill: Value that replaces a null.
        mask: Input of the graph that receives a mark for each value that is not null.
        cast: Accept other numeric types, if no value loses precision.
        unit: Unit of the numbers that replace dates and times.
        as: Conversion of decimals to numbers.
        max_length: Maximum number of elements in the list of a row.
        padding: Value that fills shorter rows.
        truncate: End of a longer row to keep, or `refuse` to reject the row.
        lengths: Input of the graph that receives the length of each row's list.
        buckets: Lengths, ascending, that rows are padded to.
        vocabulary: File beside the model with one word a line; the index of its line replaces a
            word.
        one_hot: Encode an index as a row of zeros with the number 1 at the index.
        unknown: Index of a word that the vocabulary does not contain.
    """

    tensor: str
    column: str | None = None
    columns: Annotated[tuple[str, ...], Meta(max_length=COLUMNS_MAX)] = ()
    type: str = ""
    nullable: bool = False
    nulls: Literal["reject", "fill", "nan", "mask"] | None = None
    fill: Value | None = None
    mask: str = ""
    cast: bool = False
    unit: Unit | None = None
    conversion: Literal["number", "unscaled"] | None = msgspec.field(default=None, name="as")
    max_length: Annotated[int, Meta(ge=1, le=LENGTH_MAX)] | None = None
    padding: Value | None = None
    truncate: Literal["head", "tail", "refuse"] | None = None
    lengths: str = ""
    buckets: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=LENGTH_MAX)], ...], Meta(max_length=BUCKETS_MAX)
    ] = ()
    vocabulary: str = ""
    one_hot: bool = False
    unknown: Annotated[int, Meta(ge=0)] | Literal["reject"] | None = None


class WarmUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[warm_up]` of a manifest: batches that run before the first request.

    Attributes:
        values: Values of every input; `random` is a uniform distribution from `low` to `high`.
        low: Lower bound of random values.
        high: Upper bound of random values.
        seed: Seed of random values.
        samples: An `.npz` file beside the model with an array for each input tensor, by its name.
        results: An `.npz` file with the expected outputs; a difference above `absolute` plus
            `relative` times the expected value is a load error.
        absolute: Absolute tolerance of a result.
        relative: Relative tolerance of a result.
    """

    values: Literal["ones", "zeros", "random"] = "ones"
    low: float = 0.0
    high: float = 1.0
    seed: Annotated[int, Meta(ge=0)] = 0
    samples: str = ""
    results: str = ""
    absolute: Annotated[float, Meta(ge=0)] = 1e-6
    relative: Annotated[float, Meta(ge=0)] = 1e-4


@thread_safe
class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest as written, before compilation.

    Attributes:
        format: Version of the manifest format.
        inputs: Every input of the graph.
        outputs: Result columns, in order.
        passthrough: Request columns that the response returns unchanged.
        combine: Whether rows of several requests may run as one batch; by default, as measured at
            the load. `false` also runs each request as a whole.
        columns: Position of passed-through columns relative to the outputs, or all column names in
            order.
        graph: Tensors of a model whose files declare none.
        python: Options of the backend `python`.
        torch: Options of the backend `torch`.
        remote: Options of the backend `remote`.
        steps: Models of a pipeline, in order.
        sha256: Required hashes of files beside the manifest, by name.
        custom_ops: Operator libraries that the graph needs, with their names in
            `loading.custom_ops`.
        warm_up: First batches; by default one row of ones, and a larger batch of ones.
    """

    format: Literal[1]
    inputs: tuple[InputColumn, ...]
    outputs: tuple[OutputColumn, ...]
    passthrough: Passthrough = "none"
    columns: ColumnOrder = "passthrough_first"
    graph: GraphSection = GraphSection()
    python: PythonSection = PythonSection()
    sha256: dict[str, Annotated[str, Meta(pattern=r"^[0-9A-Fa-f]{64}\Z")]] = {}
    custom_ops: tuple[str, ...] = ()
    warm_up: WarmUp = WarmUp()
    torch: TorchSection = TorchSection()
    steps: Steps = ()
    remote: RemoteSection | None = None
    combine: bool | None = None


def model_file(path: Path, backend: str = "onnx") -> Path:
    """Return the model file of a configured path: in a folder, the ONNX graph or the manifest."""
    if not path.is_dir():
        return path
    return path / ("model.onnx" if backend == "onnx" else "manifest.toml")


def read_manifest(path: Path) -> Manifest | None:
    """Return the `manifest.toml` beside the model, or None if the file does not exist.

    Raises:
        ManifestError: The file cannot be read, or breaks a rule; the error names the key and the
            rule.
    """
    file = existing_inside(model_file(path).parent, "manifest.toml")
    if file is None:
        return None
    try:
        raw = read_plain(file, MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        raise ManifestError(f"manifest.toml cannot be read: {error.strerror}") from None
    is_small = len(raw) <= MANIFEST_BYTES_MAX
    require(is_small, f"manifest.toml is larger than {MANIFEST_BYTES_MAX} bytes")
    try:
        manifest = msgspec.toml.decode(raw, type=Manifest)
    except ValueError as error:
        raise ManifestError(f"manifest.toml: {error}") from None
    except RecursionError:
        raise ManifestError("manifest.toml is nested too deeply") from None
    low, high = manifest.warm_up.low, manifest.warm_up.high
    require(low <= high, f"manifest.toml: warm_up.low = {low:g} is above warm_up.high = {high:g}")
    has_samples = not manifest.warm_up.results or bool(manifest.warm_up.samples)
    require(has_samples, "manifest.toml: warm_up.results needs warm_up.samples")
    return manifest
