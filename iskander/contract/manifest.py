"""A model folder on disk: which file is the model, and what the manifest beside it says.

Reading one runs in the worker that loads the model and in the operator's tool; the gateway opens no
model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from iskander.contract.backend_manifest import GraphSection, PythonSection, Steps, TorchSection
from iskander.contract.outputs import ColumnOrder, OutputColumn
from iskander.contract.paths import read_plain
from iskander.decoders import thread_safe
from iskander.errors import ManifestError

MANIFEST_BYTES_MAX = 1 << 20
COLUMNS_MAX = 4096
"""Of one tensor."""
LENGTH_MAX = 1 << 20
"""Elements of one row of a list."""
BUCKETS_MAX = 16

Passthrough = Literal["all", "none"] | tuple[str, ...]
Unit = Literal["ns", "us", "ms", "s", "m", "h", "d"]
Value = bool | int | float | str


class InputColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`[[inputs]]` of a manifest: which columns are which tensor, and how they become it.

    Which keys belong together is on the page `docs/models.md`; `contract.inputs` holds them against
    the graph.

    Attributes:
        tensor: Input of the graph.
        column: Of the batch; `a.b` is a field of a struct.
        columns: Several, packed into the tensor's last axis in this order.
        type: In which the column is sent; the tensor's own where it is not said.
        nullable: The old word for `nulls`; `true` wants that beside it.
        nulls: What a null becomes; it is refused where this is not said.
        fill: The value in place of nulls.
        mask: Input of the graph that says where there was a value.
        cast: Other types of numbers are taken too, where no value is lost.
        unit: Of the numbers that dates and times become.
        as: How decimals become numbers.
        max_length: Elements of a row of lists.
        padding: What shorter rows are filled up with.
        truncate: Which end of longer rows is kept, or that they are refused.
        lengths: Input of the graph that says how long each row is.
        buckets: Lengths, ascending, that rows are padded to.
        vocabulary: File beside the model with a line for each word; words become their numbers.
        one_hot: A number becomes a row of zeros with a one.
        unknown: What a word becomes that the vocabulary does not have.
    """

    tensor: str
    column: str | None = None
    columns: Annotated[tuple[str, ...], msgspec.Meta(max_length=COLUMNS_MAX)] = ()
    type: str = ""
    nullable: bool = False
    nulls: Literal["reject", "fill", "nan", "mask"] | None = None
    fill: Value | None = None
    mask: str = ""
    cast: bool = False
    unit: Unit | None = None
    conversion: Literal["number", "unscaled"] | None = msgspec.field(default=None, name="as")
    max_length: Annotated[int, msgspec.Meta(ge=1, le=LENGTH_MAX)] | None = None
    padding: Value | None = None
    truncate: Literal["head", "tail", "refuse"] | None = None
    lengths: str = ""
    buckets: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=LENGTH_MAX)], ...],
        msgspec.Meta(max_length=BUCKETS_MAX),
    ] = ()
    vocabulary: str = ""
    one_hot: bool = False
    unknown: Annotated[int, msgspec.Meta(ge=0)] | Literal["reject"] | None = None


class WarmUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[warm_up]` of a manifest: the first batches, before any caller's.

    Attributes:
        values: Of every input; `random` are evenly spread from `low` to `high`.
        low: The least of random values.
        high: The largest of them.
        seed: Of them: equal seeds give equal values.
        samples: An `.npz` file beside the model with an array for each input tensor, by its name.
        results: Another with what outputs have to be for them; a difference beyond `absolute` plus
            `relative` times the recorded value is a load error.
        absolute: By how much a result may differ.
        relative: By what part of the recorded value it may differ besides.
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
    """A manifest as written, before it is held against a graph.

    Attributes:
        format: Of this file.
        inputs: Every input of the graph.
        outputs: The columns of results, in their order.
        passthrough: Columns of the request that come back as they are.
        columns: Whether passed-through columns come before the outputs, or the order of all.
        graph: Tensors of a model that declares none.
        python: Of the backend `python`.
        torch: Of the backend `torch`.
        steps: Of a pipeline: models in a row that are one.
        sha256: Hashes that files beside the manifest have to have, by name.
        custom_ops: Operator libraries that the graph needs, as `loading.custom_ops` names them.
        warm_up: First batches; a row of ones and a larger batch of them where it is not there.
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


def model_file(path: Path, backend: str = "onnx") -> Path:
    """The file that a configured path means: itself, or what makes a folder a model.

    For ONNX that is the graph, for all others the manifest, which names their files.
    """
    if not path.is_dir():
        return path
    return path / ("model.onnx" if backend == "onnx" else "manifest.toml")


def read_manifest(path: Path) -> Manifest | None:
    """The `manifest.toml` beside the model, or None where there is none.

    Raises:
        ManifestError: It cannot be read, or is not a manifest; names the key and the rule.
    """
    file = model_file(path).parent / "manifest.toml"
    try:
        raw = read_plain(file, MANIFEST_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ManifestError(f"manifest.toml cannot be read: {error.strerror}") from None
    if len(raw) > MANIFEST_BYTES_MAX:
        raise ManifestError(f"manifest.toml is larger than {MANIFEST_BYTES_MAX} bytes")
    try:
        manifest = msgspec.toml.decode(raw, type=Manifest)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"manifest.toml: {error}") from None
    except RecursionError:
        raise ManifestError("manifest.toml is nested too deeply") from None
    plan = manifest.warm_up
    if plan.low > plan.high:
        raise ManifestError(f"manifest.toml: warm_up.low = {plan.low:g} is above high")
    if plan.results and not plan.samples:
        raise ManifestError("manifest.toml: warm_up.results are of no warm_up.samples")
    return manifest
