"""Settings of sampled requests: the process that receives them, and the prediction log."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from iskander.config.section import MIB, Live, Positive, Seconds, Section, require

Share = Annotated[float, Meta(ge=0, le=1)]
ColumnNames = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=1000)], ...], Meta(max_length=10_000)
]


class ObservationConfig(Section, frozen=True, kw_only=True):
    """Sampled requests on their way to the observer process, of each gateway process.

    Attributes:
        held_requests: Sampled requests whose memory is held until the observer process has copied
            it; further ones are not sampled.
        held_bytes: Bytes of this memory. A request that finds an arena full takes it at once.
        held_s: Seconds after which such memory is released without a copy.
        buffer_bytes: Bytes of copies that wait in the observer process; further requests are
            dropped.
    """

    restart_reason: ClassVar[str] = "the observer process receives it at its start"

    held_requests: Live[Annotated[int, Meta(ge=1, le=16_384)]] = 256
    held_bytes: Live[Positive] = 32 * MIB
    held_s: Live[Seconds] = 5.0
    buffer_bytes: Positive = 128 * MIB


class PredictionLogConfig(Section, frozen=True, kw_only=True):
    """Parquet files with the inputs and outputs of sampled requests; see `docs/observing.md`.

    A model is logged only if its `[models.prediction_log]` has a share.

    Attributes:
        path: Folder, relative to this file, or URI of an object store, such as
            `s3://bucket/predictions`. Empty: off.
        file_bytes: Bytes at which a file is completed.
        file_s: Seconds after its first row at which a file is completed.
        compression: Compression of the files.
        buffer_bytes: Bytes of rows that wait for a file, or in its unwritten part; further requests
            are dropped.
        spool: Folder for files on their way to an object store, relative to this file. Required
            for a URI.
        spool_bytes: Bytes of completed files there; while it is full, requests are dropped.
        key_file: File with 32 to 4096 random bytes, the key of hashed columns; relative to this
            file. Created if it does not exist. Required to hash columns.
    """

    restart_reason: ClassVar[str] = "the observer process receives it at its start"

    path: str = ""
    file_bytes: Annotated[int, Meta(ge=1024, le=1 << 40)] = 128 * MIB
    file_s: Seconds = 300.0
    compression: Literal["zstd", "snappy", "lz4", "none"] = "zstd"
    buffer_bytes: Positive = 64 * MIB
    spool: str = ""
    spool_bytes: Positive = 1024 * MIB
    key_file: str = ""

    @property
    def is_remote(self) -> bool:
        return is_uri(self.path) and not self.path.startswith("file://")


class ModelLogConfig(Section, frozen=True, kw_only=True):
    """Logged share and columns of one model.

    Attributes:
        share: Share of its requests that are logged: 0 to 1.
        omit: Columns that are left out, by their names in the files. A name that is no column stops
            the log of the model.
        hash: Columns whose values are replaced by keyed hashes; as `omit`.
    """

    restart_reason: ClassVar[str] = "the observer process receives it at its start"

    share: Share = 0.0
    omit: ColumnNames = ()
    hash: ColumnNames = ()


def is_uri(path: str) -> bool:
    return "://" in path


def require_log(log: PredictionLogConfig) -> None:
    """Check the settings of the prediction log against one another.

    Raises:
        ConfigError: The spool folder is missing or has no effect.
    """
    require(
        bool(log.spool) or not log.is_remote,
        "prediction_log.path is an object store: set prediction_log.spool to a local folder",
    )
    has_effect = log.is_remote or not log.spool
    require(has_effect, "prediction_log.spool has no effect without an object store")


def require_model_log(model: ModelLogConfig, log: PredictionLogConfig, where: str) -> None:
    """Check the logged share and columns of a model against `[prediction_log]`.

    Raises:
        ConfigError: Names `where` and the setting without effect, or the missing key.
    """
    has_effect = bool(log.path) or not model.share
    require(has_effect, f"{where}.share has no effect without prediction_log.path")
    needs_key = f"{where}.hash: set prediction_log.key_file, the key of the hashes"
    require(bool(log.key_file) or not model.hash, needs_key)
    both = ", ".join(sorted(set(model.omit) & set(model.hash)))
    require(not both, f"{where}: `{both}` is both in omit and in hash")
