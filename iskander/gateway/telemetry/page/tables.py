"""Tables of the page: captions, and columns as fields of the status document.

The server renders them, and `page.js` updates them by the same fields and formats, which are
attributes of the table heads. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "state", "number", "bytes", "seconds", "flag", "codes", "time"]


@dataclass(frozen=True)
class Column:
    """A column; the first one of a table is the head of its rows."""

    head: str
    field: str
    kind: Kind = "number"


@dataclass(frozen=True)
class Table:
    """A table with a row for each entry of a list of the status document.

    Attributes:
        key: Identifier on the page.
        entries: Name of the list.
        empty: Text without entries.
    """

    key: str
    entries: str
    caption: str
    columns: tuple[Column, ...]
    empty: str = "None."


_MODEL = (Column("Model", "name", "text"), Column("Version", "version", "text"))

MODELS = Table(
    "models",
    "models",
    "Models",
    (
        *_MODEL,
        Column("State", "state", "state"),
        Column("Isolated", "isolated", "flag"),
        Column("Workers", "workers"),
        Column("Requests/s", "requests_per_s"),
        Column("Rows/s", "rows_per_s"),
        Column("p50 ms", "total_p50_ms"),
        Column("p95 ms", "total_p95_ms"),
        Column("p99 ms", "total_p99_ms"),
        Column("Reason", "reason", "text"),
    ),
    "No model is served or loading.",
)
QUEUES = Table(
    "queues",
    "models",
    "Queues and batches",
    (
        *_MODEL,
        Column("Requests", "queue_requests"),
        Column("Rows", "queue_rows"),
        Column("Bytes", "queue_bytes", "bytes"),
        Column("Oldest", "oldest_s", "seconds"),
        Column("Batches", "batches"),
        Column("Mean rows", "batch_rows"),
        Column("Rejected", "refusals", "codes"),
        Column("Failed", "failures", "codes"),
        Column("Relation of rows", "row_relation", "text"),
    ),
)
WORKERS = Table(
    "workers",
    "workers",
    "Workers",
    (
        Column("Worker", "index"),
        Column("State", "state", "state"),
        Column("Core group", "group"),
        Column("Cpus", "cpus", "text"),
        Column("Pool", "pool", "text"),
        Column("GPU", "gpu", "text"),
        Column("Incarnation", "incarnation"),
        Column("Starts", "starts"),
        Column("Ends", "ends", "codes"),
        Column("Batches", "batches"),
        Column("Running", "in_flight"),
        Column("Memory", "resident_bytes", "bytes"),
        Column("Heartbeat age", "heartbeat_s", "seconds"),
        Column("Notices", "notices", "text"),
    ),
)
GPUS = Table(
    "gpus",
    "gpus",
    "GPUs",
    (
        Column("GPU", "gpu", "text"),
        Column("Name", "name", "text"),
        Column("State", "state", "state"),
        Column("Busy %", "utilization_percent"),
        Column("Used", "memory_used_bytes", "bytes"),
        Column("Memory", "memory_total_bytes", "bytes"),
        Column("Celsius", "temperature_c"),
        Column("Watts", "power_w"),
        Column("ECC corrected", "ecc_corrected"),
        Column("Uncorrected", "ecc_uncorrected"),
        Column("Xid", "xids", "codes"),
        Column("PCIe replays", "pcie_replays"),
        Column("Reading age", "age_s", "seconds"),
        Column("Reason", "reason", "text"),
    ),
    "No worker has a GPU.",
)
SHADOWS = Table(
    "shadows",
    "shadows",
    "Shadow versions",
    (
        Column("Model", "name", "text"),
        Column("Served", "served", "text"),
        Column("Candidate", "candidate", "text"),
        Column("State", "state", "state"),
        Column("Share", "share"),
        Column("Compared rows", "rows"),
        Column("Differing %", "disagreeing_percent"),
        Column("Dropped rows", "dropped", "codes"),
        Column("Rows of a batch", "run_rows"),
        Column("Served run ms", "served_run_ms"),
        Column("Candidate run ms", "candidate_run_ms"),
        Column("Reason", "reason", "text"),
    ),
)
SHADOW_OUTPUTS = Table(
    "shadow-outputs",
    "shadow_outputs",
    "Outputs of shadow versions",
    (
        Column("Model", "name", "text"),
        Column("Served", "served", "text"),
        Column("Candidate", "candidate", "text"),
        Column("Output", "output", "text"),
        Column("Differing %", "disagreeing_percent"),
        Column("Relative difference p50 %", "relative_p50_percent"),
        Column("p99 %", "relative_p99_percent"),
        Column("Highest %", "relative_max_percent"),
        Column("Unmatched values", "unmatched"),
        Column("Differing labels", "pairs", "codes"),
    ),
)
DRIFT = Table(
    "drift",
    "drift",
    "Drift",
    (
        *_MODEL,
        Column("Process", "process"),
        Column("Side", "side", "text"),
        Column("Column", "column", "text"),
        Column("State", "state", "state"),
        Column("Severity", "severity"),
        Column("PSI", "psi"),
        Column("KS", "ks"),
        Column("Missing", "missing"),
        Column("Out of range", "out_of_range"),
        Column("New labels", "new_labels"),
        Column("Recent", "recent", "text"),
        Column("Reference", "reference", "text"),
        Column("Recent rows", "recent_rows"),
        Column("Reference rows", "reference_rows"),
        Column("Source", "origin", "text"),
    ),
    "No column is compared with a reference.",
)
MEMORY = Table(
    "memory",
    "memory",
    "Memory",
    (
        Column("Memory", "name", "text"),
        Column("Process", "process"),
        Column("Used", "used_bytes", "bytes"),
        Column("Limit", "limit_bytes", "bytes"),
        Column("In use", "count"),
        Column("Huge pages", "huge_bytes", "bytes"),
        Column("Locked", "locked", "flag"),
    ),
)
PROCESSES = Table(
    "processes",
    "processes",
    "Gateway processes",
    (
        Column("Process", "process"),
        Column("State", "state", "state"),
        Column("Starts", "starts"),
        Column("Uptime", "uptime_s", "seconds"),
        Column("Loop lag p50 ms", "loop_lag_p50_ms"),
        Column("p99 ms", "loop_lag_p99_ms"),
        Column("Memory", "resident_bytes", "bytes"),
        Column("Streams", "streams"),
        Column("Calls", "calls"),
    ),
)
EVENTS = Table(
    "events",
    "events",
    "Events",
    (
        Column("Time (UTC)", "at_s", "time"),
        Column("Process", "process"),
        Column("Level", "level", "state"),
        Column("Event", "text", "text"),
    ),
    "No event since the start.",
)
TABLES = (MODELS, QUEUES, SHADOWS, SHADOW_OUTPUTS, DRIFT, WORKERS, GPUS, PROCESSES, MEMORY, EVENTS)
