"""Golden frames of the control protocol, for one `PROTOCOL_VERSION`.

During an upgrade, a gateway and a worker may have different releases. They compare versions, so
bytes change only together with `PROTOCOL_VERSION`. To change bytes, increase it and run
`python tests/spec/test_messages.py`, which writes the vectors.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from iskander.contract.column_types import ColumnType
from iskander.contract.outputs import Rank
from iskander.contract.processing.row_relation import RowRelation
from iskander.contract.tensors import Contract, ResultColumn, TensorSpec
from iskander.errors import ProtocolError
from iskander.interprocess.control import messages
from iskander.interprocess.control.channel import FRAME_BYTES_MAX
from iskander.interprocess.control.messages import (
    PROTOCOL_VERSION,
    Copied,
    Done,
    Drain,
    Execute,
    Failed,
    Hello,
    Leaving,
    Load,
    Loaded,
    LoadFailed,
    LoadStep,
    ModelSpec,
    Notice,
    Probe,
    Probed,
    Refused,
    Slice,
    Stepped,
    Unload,
    Unloaded,
    Welcome,
    decode_hello,
    decode_to_gateway,
    decode_to_worker,
    decode_welcome,
    encode,
    require_protocol,
)

VECTORS = Path(__file__).parent / "vectors" / "messages.json"

MODEL = ModelSpec(
    key=3,
    name="ranker",
    version="7",
    backend="onnx",
    path="/models/ranker/7/model.onnx",
    execution_providers=("cuda", "cpu"),
    threads_intra=4,
    threads_inter=2,
    optimization_level="level3",
    is_parallel=True,
    has_memory_pattern=False,
    rows_max=65536,
    string_bytes=256,
    fingerprint="/models/ranker/7/model.onnx 1 2 3",
)
CONTRACT = Contract(
    inputs=(
        TensorSpec("user", "input_0", ColumnType("int64"), (1,)),
        TensorSpec("image", "input_1", ColumnType("uint8", (2, 3), is_tensor=True), (2, 3)),
    ),
    outputs=(TensorSpec("score", "output_0", ColumnType("float32", (4,)), (4,), is_bound=False),),
    passthrough=("user", "id"),
    rows_fixed=8,
    columns=(
        ResultColumn("score", "fixed_size_list<float32>[4]", (0,), "output_0, softmax"),
        ResultColumn("place", "int32", (0,), "rank of score", Rank("score", "user", "ascending")),
    ),
    column_order=("id", "score", "place"),
)
SAMPLES: dict[str, Any] = {
    "Hello": Hello(protocol=4, version="0.1.0", group=2, index=5, cpus=(0, 1, 300)),
    "Hello of a new worker": Hello(protocol=4, version="0.1.0", group=None, index=None, cpus=()),
    "Welcome": Welcome(
        incarnation=9,
        index=5,
        group=2,
        cpus=(4, 5),
        cores=1,
        node=1,
        input_bytes=1 << 28,
        output_bytes=1 << 26,
        heartbeat_bytes=4096,
        reattach_s=30.0,
        peers=("/run/iskander/process-1/attach.sock",),
    ),
    "Welcome without a node": Welcome(1, 0, 0, (0,), 1, None, 1, 2, 3, 0.0),
    "Refused": Refused(code="protocol", message="every place of the plan has its worker"),
    "Load": Load(model=MODEL),
    "Execute": Execute(
        batch_id=77,
        model=3,
        rows=128,
        slices=(
            Slice(input_offset=4416, request_rows=100, first=0, rows=100, output_offset=8192),
            Slice(input_offset=16704, request_rows=640, first=512, rows=20, output_offset=8640),
        ),
    ),
    "Execute of one whole request": Execute(78, 3, 128, (Slice(4416, 128, 0, 128, 8192),)),
    "Execute of large numbers": Execute(
        2**63 - 1, 2**31, 2**31, (Slice(2**40, 2**31, 2**30, 2**30, 2**40),)
    ),
    "Execute with a deadline and hops": Execute(
        79, 3, 128, (Slice(4416, 128, 0, 128, 8192),), 0, 2**61 - 1, 2
    ),
    "Probe": Probe(model=3),
    "Drain": Drain(is_stopping=True),
    "Drain of a worker that is replaced": Drain(),
    "Loaded": Loaded(
        model=3,
        contract=CONTRACT,
        providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
        threads=4,
        load_ms=812.5,
    ),
    "Loaded with the hash of the files": Loaded(
        3, CONTRACT, ("CPUExecutionProvider",), 4, 8.0, "ab" * 32
    ),
    "Loaded with dependent rows": Loaded(
        3,
        CONTRACT,
        (),
        1,
        0.0,
        rows=RowRelation("dependent", "row 1 differs by 0.5 in a batch of 8 rows", combine=False),
    ),
    "Loaded with its library": Loaded(
        3, CONTRACT, ("CPUExecutionProvider",), 4, 8.0, library="ONNX Runtime 1.31.1"
    ),
    "Loaded with defaults": Loaded(0, Contract((), (), "all"), (), 1, 0.0),
    "LoadStep": LoadStep(model=3, step="building TensorRT engines", seconds=20.0),
    "LoadFailed": LoadFailed(model=3, code="manifest", message="no such tensor"),
    "Unload": Unload(model=3),
    "Unloaded": Unloaded(model=3),
    "Done": Done(batch_id=77, run_ns=156_000),
    "Copied": Copied(in_bytes=19_267_584, out_bytes=128_000),
    "Stepped": Stepped(model=3, steps=(("embed", 1_500_000), ("rank", 70_000))),
    "Failed": Failed(batch_id=77, code="execution_failed", message="refused"),
    "Failed with a time to retry": Failed(78, "remote_overloaded", "queue full", 250),
    "Failed with the cause": Failed(79, "execution_failed", "stof", None, True, 5, "age"),
    "Probed": Probed(model=3, reason="connection refused"),
    "Leaving": Leaving(),
    "Notice": Notice(text="no memory policy for node 1"),
}
DIRECTIONS: list[tuple[Any, Any]] = [
    (messages.ToGatewayHandshake, decode_hello),
    (messages.ToWorkerHandshake, decode_welcome),
    (messages.ToWorker, decode_to_worker),
    (messages.ToGateway, decode_to_gateway),
]


def members(union: Any) -> set[type]:
    return set(typing.get_args(union)) or {union}


def decoder_of(message: Any) -> Any:
    (decode,) = (decode for union, decode in DIRECTIONS if type(message) in members(union))
    return decode


def frame_of(message: Any) -> bytes:
    """Returns the frame of a message: an array of one message, or a handshake message alone."""
    is_in_array = decoder_of(message) in (decode_to_worker, decode_to_gateway)
    return encode([message] if is_in_array else message)


def read_frame(message: Any, frame: bytes) -> Any:
    """Decodes a frame of one message, in the direction of `message`."""
    read = decoder_of(message)(frame)
    if isinstance(read, list):
        (read,) = read
    return read


def read_vectors() -> dict[str, Any]:
    return json.loads(VECTORS.read_text("utf-8"))


def test_each_message_has_a_golden_frame() -> None:
    """A new message needs a sample in `SAMPLES`, and a line in the vectors."""
    known = set().union(*(members(union) for union, _ in DIRECTIONS))

    assert {type(message) for message in SAMPLES.values()} == known
    assert set(read_vectors()["messages"]) == set(SAMPLES), "run this file to write the vectors"


def test_vectors_have_the_current_version() -> None:
    assert read_vectors()["protocol_version"] == PROTOCOL_VERSION, (
        "PROTOCOL_VERSION was increased: run `python tests/spec/test_messages.py` to write the "
        "vectors of the new version"
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_bytes_match_the_golden_frame_of_the_version(name: str) -> None:
    vectors = read_vectors()

    frame = frame_of(SAMPLES[name]).hex()

    if vectors["protocol_version"] == PROTOCOL_VERSION:
        assert frame == vectors["messages"][name], (
            f"the bytes of `{name}` changed and PROTOCOL_VERSION is still {PROTOCOL_VERSION}: a "
            "gateway and a worker of two releases are incompatible; increase it"
        )


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_frame_decodes_to_its_message(name: str) -> None:
    frame = bytes.fromhex(read_vectors()["messages"][name])

    message = read_frame(SAMPLES[name], frame)

    assert message == SAMPLES[name]
    assert type(message) is type(SAMPLES[name])
    assert len(frame) < FRAME_BYTES_MAX


@pytest.mark.parametrize("name", SAMPLES)
def test_message_of_another_direction_is_rejected(name: str) -> None:
    frame = frame_of(SAMPLES[name])

    for _, decode in DIRECTIONS:
        if decode is not decoder_of(SAMPLES[name]):
            with pytest.raises(msgspec.ValidationError):
                decode(frame)


@pytest.mark.parametrize("name", SAMPLES)
def test_truncated_frame_is_rejected(name: str) -> None:
    frame = frame_of(SAMPLES[name])

    for length in range(len(frame)):
        with pytest.raises(ValueError):
            decoder_of(SAMPLES[name])(frame[:length])


def test_messages_of_one_frame_keep_their_order() -> None:
    to_worker = [SAMPLES["Load"], SAMPLES["Execute"], SAMPLES["Drain"]]
    to_gateway = [SAMPLES["Loaded"], SAMPLES["Done"], SAMPLES["Failed"], SAMPLES["Leaving"]]

    assert decode_to_worker(encode(to_worker)) == to_worker
    assert decode_to_gateway(encode(to_gateway)) == to_gateway


def test_tags_are_unique() -> None:
    """A tag identifies a message in any direction."""
    kinds = [kind for union, _ in DIRECTIONS for kind in members(union)]
    tags = [msgspec.inspect.type_info(kind).tag for kind in kinds]  # type: ignore[union-attr]

    assert len(set(tags)) == len(kinds)


def test_other_protocol_versions_are_rejected() -> None:
    require_protocol(PROTOCOL_VERSION)

    for theirs in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
        with pytest.raises(ProtocolError, match=f"uses version {theirs} "):
            require_protocol(theirs)


def write_vectors() -> None:
    """Writes the golden frames; fails if bytes changed and `PROTOCOL_VERSION` did not."""
    frames = {name: frame_of(message).hex() for name, message in SAMPLES.items()}
    if VECTORS.exists():
        old = read_vectors()
        changed = [name for name, frame in old["messages"].items() if frames.get(name) != frame]
        if changed and old["protocol_version"] == PROTOCOL_VERSION:
            raise SystemExit(f"increase PROTOCOL_VERSION first: the bytes of {changed} changed")
    vectors = {"protocol_version": PROTOCOL_VERSION, "messages": frames}
    VECTORS.write_text(json.dumps(vectors, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    write_vectors()
