"""Settings of sources: files that Flight clients read with their scores."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from iskander.config.models import ModelConfig
from iskander.config.section import (
    MIB,
    Live,
    NotNegativeSeconds,
    Positive,
    Seconds,
    Section,
    require,
)

COLUMNS_MAX = 10_000
FILTER_CHARACTERS_MAX = 8192
LOCATIONS_MAX = 64

Names = Annotated[tuple[Annotated[str, Meta(max_length=1000)], ...], Meta(max_length=COLUMNS_MAX)]
Filter = Annotated[str, Meta(max_length=FILTER_CHARACTERS_MAX)]
UnitRows = Annotated[int, Meta(ge=1, le=2**40)]


class SourceConfig(Section, frozen=True, kw_only=True):
    """Files that Flight clients read with their scores, by `GetFlightInfo` and `DoGet`.

    Attributes:
        name: Name of the source; no model of this file has it.
        path: Parquet, CSV or Arrow IPC file, or a folder of such files; relative to this file.
            Clients read nothing outside of it.
        model: Model that scores the rows, unless a client names another.
        version: Version or alias of this model; by default that of the routing.
        keep: Columns of the files that are returned with the results; by default all.
        filter: Condition of the rows, as of `iskander score --filter`; a client's own condition
            applies in addition.
        unit_rows: Rows of one endpoint, rounded to row groups; by default an endpoint has 128 MiB
            of files at most.
        plain_files: Read the files of a Delta, Iceberg or Hudi table as they are, with removed and
            repeated rows. Without it they are an error.
    """

    restart_reason: ClassVar[str] = "sources are created at the start"

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}\Z")]
    path: Annotated[str, Meta(min_length=1)]
    model: Annotated[str, Meta(min_length=1, max_length=128)]
    version: str | int | None = None
    keep: Names | None = None
    filter: Filter = ""
    unit_rows: UnitRows | None = None
    plain_files: bool = False

    @property
    def version_text(self) -> str | None:
        return None if self.version is None else str(self.version)


class SourceReadsConfig(Section, frozen=True, kw_only=True):
    """Limits of reads of `[[sources]]`, and gateways that share them.

    Attributes:
        locations: Flight URIs of gateways with the same sources, such as `grpc://10.0.0.1:50051`;
            endpoints are spread over them. Empty: clients read on the connection that they have.
        key_file: File with at least 32 random bytes that signs tickets, the same at all of
            `locations`; relative to this file. Empty: a random key in the runtime directory.
        ticket_s: Seconds for which a ticket is valid.
        streams: Reads at once, of each gateway process, each in a process of its own. More wait.
        wait_s: Seconds that a call waits for one of `streams`.
        endpoints: Endpoints of one answer.
        step_s: Seconds for each step of a read: its start, and the time without progress.
        idle_s: Seconds after which an unused process ends; a new one starts in about 0.3 s.
        memory_bytes: Private memory of the process of one read.
    """

    restart_reason: ClassVar[str] = "tickets are signed with it"

    locations: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^grpc(\+tcp|\+tls|\+unix)?://\S{1,1000}\Z")], ...],
        Meta(max_length=LOCATIONS_MAX),
    ] = ()
    key_file: str = ""
    ticket_s: Live[Seconds] = 3600.0
    streams: Live[Annotated[int, Meta(ge=1, le=256)]] = 4
    wait_s: Live[Seconds] = 30.0
    endpoints: Live[Annotated[int, Meta(ge=1, le=4096)]] = 256
    step_s: Live[Seconds] = 60.0
    idle_s: Live[NotNegativeSeconds] = 30.0
    memory_bytes: Live[Positive] = 2048 * MIB


def require_sources(
    sources: tuple[SourceConfig, ...],
    reads: SourceReadsConfig,
    models: tuple[ModelConfig, ...],
    *,
    has_repository: bool,
) -> None:
    """Check the sources against one another and against the models.

    Raises:
        ConfigError: Two sources, or a source and a model, have one name; the model does not exist.
    """
    names = {model.name for model in models}
    seen: set[str] = set()
    for index, source in enumerate(sources):
        where = f"sources[{index}]"
        require(source.name not in names, f"{where}: `{source.name}` is the name of a model")
        require(source.name not in seen, f"{where}: duplicate of `{source.name}`")
        is_known = source.model in names or has_repository
        require(is_known, f"{where}.model = {source.model}: no model of [[models]] has this name")
        seen.add(source.name)
    has_effect = bool(sources) or reads == SourceReadsConfig()
    require(has_effect, "[source_reads] has no effect without [[sources]]")
