"""Messages between a gateway and its observer process, on one SOCK_SEQPACKET socket.

    gateway -> observer   Start            once, first
                          Arena + fd       before the first sample in this memory
                          ArenaClosed      its worker has ended
                          Model            before the first sample of it
                          ModelsForgotten  models are sent again before later samples of them
                          Samples          leases that the gateway holds
                          Verdicts         answers to Copied
    observer -> gateway   Copied           leases that it has read, or will not read
                          Report           at most once a second

The gateway may release a lease at any time and write other data into it. So a copy is valid only
after the gateway has found, when it processed `Copied`, that it still held the lease. Both ends are
of one installation, so the messages have no version.

Pure.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.contract.tensors import Contract

FRAME_BYTES_MAX: Final = 1 << 18
"""Limit of a frame, as in `control.channel`: the largest socket buffer holds one frame."""
SAMPLES_MAX: Final = 256
"""Samples in one frame."""
INPUT_ARENA: Final = 0
"""Number of the gateway's input arena; that of an output arena is its worker's incarnation."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Settings, without models and secrets, and the number of the gateway process."""

    config: Config
    process: int


class Arena(msgspec.Struct, frozen=True, tag=True):
    """An arena, whose descriptor comes with the message."""

    number: int
    length_bytes: int


class ArenaClosed(msgspec.Struct, frozen=True, tag=True):
    """No later sample is in this arena."""

    number: int


class Model(msgspec.Struct, frozen=True, tag=True):
    """A model of samples; `bucket` is the one of the contract."""

    key: int
    bucket: int
    name: str
    version: str
    contract: Contract
    settings: ModelConfig


class ModelsForgotten(msgspec.Struct, frozen=True, tag=True):
    """The models that were sent are not used any more."""


class OutputPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Results of some rows in an arena."""

    arena: int
    offset: int
    length_bytes: int
    first: int
    rows: int


class SampleRef(msgspec.Struct, frozen=True, array_like=True):
    """A sampled request in the arenas.

    Attributes:
        ticket: Number of the held leases, never used twice for one process.
        id: Identifier of the sample; 16 bytes.
        time_ns: Unix time of the results.
        offset: Offset of the IPC message of its inputs in the input arena.
        outputs: Ranges of its results, in the order of the rows.
    """

    ticket: int
    key: int
    bucket: int
    rows: int
    id: bytes
    time_ns: int
    offset: int
    length_bytes: int
    outputs: tuple[OutputPart, ...]


class Samples(msgspec.Struct, frozen=True, tag=True):
    """Sampled requests."""

    refs: tuple[SampleRef, ...]


class Verdicts(msgspec.Struct, frozen=True, tag=True):
    """Tickets of copies that are valid, and of copies that may have read other data."""

    valid: list[int]
    invalid: list[int]


class Copied(msgspec.Struct, frozen=True, tag=True):
    """Tickets of copied samples, and of samples without space for a copy."""

    tickets: list[int]
    refused: list[int]


class Report(msgspec.Struct, frozen=True, tag=True):
    """Last report of each consumer by name, of which the gateway reads `counts` and `failure`."""

    values: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        """Check what the gateway reads; raises ValueError."""
        for name, report in self.values.items():
            counts = report.get("counts", {})
            is_valid = isinstance(counts, dict) and isinstance(report.get("failure", ""), str)
            if not is_valid or not all(isinstance(count, int) for count in counts.values()):
                raise ValueError(f"the report of {name[:40]} has no valid counts and failure")


ToObserver = Start | Arena | ArenaClosed | Model | ModelsForgotten | Samples | Verdicts
encode = msgspec.msgpack.Encoder().encode
decode_to_observer = msgspec.msgpack.Decoder(ToObserver).decode
decode_to_gateway = msgspec.msgpack.Decoder(Copied | Report).decode


def start_of(config: Config, process: int) -> Start:
    """Return the first message: the settings that consumers use."""
    empty = Config()
    return Start(
        msgspec.structs.replace(
            config, models=(), sources=(), extensions=empty.extensions, access=empty.access
        ),
        process,
    )
