"""Names of files and columns of the prediction log, and the end of a file.

    PATH/model=churn/version=3/date=2026-05-01/hour=17/019f3c-5d1e.parquet

Dates and hours are of UTC. Pure. Source: Hive's partition folders, as Polars, DuckDB and pyarrow
read them: values are percent-encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple
from urllib.parse import quote

from iskander.foundation.clock import NS_PER_S

TRACE_ID, TIME, ROW = "trace_id", "time", "row"
OWN_COLUMNS: Final = (TRACE_ID, TIME, ROW)
PARTITIONS: Final = ("model", "version", "date", "hour")
END: Final = ".parquet"


class Names(NamedTuple):
    """Columns in the files of the inputs and outputs of a model."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def partition_of(model: str, version: str, time_ns: int) -> str:
    """Return the folder of a sample, relative to the log."""
    at = datetime.fromtimestamp(time_ns // NS_PER_S, UTC)
    values = (model, version, at.strftime("%Y-%m-%d"), at.strftime("%H"))
    pairs = zip(PARTITIONS, values, strict=True)
    return "/".join(f"{key}={quote(value, safe='')}" for key, value in pairs)


def file_name(time_ns: int, token: str) -> str:
    """Return the name of a file: names sort by time."""
    return f"{time_ns // NS_PER_S:08x}-{token}{END}"


def is_complete(written_bytes: int, age_ns: int, file_bytes: int, file_s: float) -> bool:
    """Whether a file has reached its size or its age."""
    return written_bytes >= file_bytes or age_ns >= file_s * NS_PER_S


def names_of(inputs: Sequence[str], outputs: Sequence[str]) -> Names:
    """Name the columns of a model's files.

    An input has its own name, and an output too. A name that is used before, or by the log itself,
    gets the prefix `input.` or `output.`. Letter case is ignored, as DuckDB does.
    """
    used = {name.casefold() for name in (*OWN_COLUMNS, *PARTITIONS)}

    def name_all(names: Sequence[str], prefix: str) -> tuple[str, ...]:
        given = []
        for wanted in names:
            name = wanted
            while name.casefold() in used:
                name = f"{prefix}.{name}"
            used.add(name.casefold())
            given.append(name)
        return tuple(given)

    return Names(name_all(inputs, "input"), name_all(outputs, "output"))
