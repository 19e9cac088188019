"""Tables of the page: captions, and columns as fields of the status document.

The server renders them, and `page.js` updates them by the same fields and formats, which are
attributes of the table heads. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from iskander.gateway.telemetry.status.document import MemoryStatus, ModelStatus, ProcessStatus
from iskander.gateway.telemetry.status.drift_status import DriftStatus
from iskander.gateway.telemetry.status.events import Event
from iskander.gateway.telemetry.status.shadow_status import OutputStatus, ShadowStatus
from iskander.gateway.telemetry.status.stats import GpuStats, WorkerStats

Kind = Literal[
    "text", "texts", "state", "number", "percent", "ranges", "bytes", "seconds", "flag", "codes",
    "time",
]  # fmt: skip

_BY_FIELD: dict[str, Kind] = {
    "state": "state", "level": "state", "at_s": "time", "cpus": "ranges", "utilization": "percent",
}  # fmt: skip
_BY_TYPE: dict[type, Kind] = {str: "text", bool: "flag", dict: "codes", tuple: "texts"}


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


def kind_of(field: str, annotation: Any) -> Kind:  # noqa: ANN401
    """Return the format of a field by its name, the unit in its name, or its type."""
    if kind := _BY_FIELD.get(field):
        return kind
    if field.endswith("_bytes"):
        return "bytes"
    if field.endswith("_s") and not field.endswith("_per_s"):
        return "seconds"
    plain = get_args(annotation)[0] if type(None) in get_args(annotation) else annotation
    return _BY_TYPE.get(getattr(plain, "__origin__", plain), "number")


def _columns(entry: type[msgspec.Struct], heads: dict[str, str]) -> tuple[Column, ...]:
    """Return the columns of fields with their heads."""
    types = {field.name: field.type for field in msgspec.structs.fields(entry)}
    return tuple(Column(head, name, kind_of(name, types[name])) for name, head in heads.items())


_VERSION = {"name": "Model", "version": "Version"}
_PAIR = {"name": "Model", "served": "Served", "candidate": "Candidate"}

TABLES = (
    Table("models", "models", "Models", _columns(ModelStatus, {
        **_VERSION, "state": "State", "isolated": "Isolated", "workers": "Workers",
        "requests_per_s": "Requests/s", "rows_per_s": "Rows/s", "total_p50_ms": "p50 ms",
        "total_p95_ms": "p95 ms", "total_p99_ms": "p99 ms", "reason": "Reason",
    }), "No model is served or loading."),
    Table("queues", "models", "Queues and batches", _columns(ModelStatus, {
        **_VERSION, "queue_requests": "Requests", "queue_rows": "Rows", "queue_bytes": "Bytes",
        "oldest_s": "Oldest", "batches": "Batches", "batch_rows": "Mean rows",
        "refusals": "Rejected", "failures": "Failed", "row_relation": "Relation of rows",
    })),
    Table("shadows", "shadows", "Shadow versions", _columns(ShadowStatus, {
        **_PAIR, "state": "State", "share": "Share", "rows": "Compared rows",
        "disagreeing_percent": "Differing %", "dropped": "Dropped rows",
        "run_rows": "Rows of a batch", "served_run_ms": "Served run ms",
        "candidate_run_ms": "Candidate run ms", "reason": "Reason",
    })),
    Table("shadow-outputs", "shadow_outputs", "Outputs of shadow versions", _columns(OutputStatus, {
        **_PAIR, "output": "Output", "disagreeing_percent": "Differing %",
        "relative_p50_percent": "Relative difference p50 %", "relative_p99_percent": "p99 %",
        "relative_max_percent": "Highest %", "unmatched": "Unmatched values",
        "pairs": "Differing labels",
    })),
    Table("drift", "drift", "Drift", _columns(DriftStatus, {
        **_VERSION, "process": "Process", "side": "Side", "column": "Column", "state": "State",
        "severity": "Severity", "psi": "PSI", "ks": "KS", "missing": "Missing",
        "out_of_range": "Out of range", "new_labels": "New labels", "recent": "Recent",
        "reference": "Reference", "recent_rows": "Recent rows", "reference_rows": "Reference rows",
        "origin": "Source",
    }), "No column is compared with a reference."),
    Table("workers", "workers", "Workers", _columns(WorkerStats, {
        "index": "Worker", "state": "State", "group": "Core group", "cpus": "Cpus", "pool": "Pool",
        "gpu": "GPU", "incarnation": "Incarnation", "starts": "Starts", "ends": "Ends",
        "batches": "Batches", "in_flight": "Running", "resident_bytes": "Memory",
        "heartbeat_s": "Heartbeat age", "device_error": "GPU error", "load_step": "Loading",
        "notices": "Notices",
    })),
    Table("gpus", "gpus", "GPUs", _columns(GpuStats, {
        "gpu": "GPU", "name": "Name", "profile": "Profile", "state": "State",
        "utilization": "Busy %", "memory_used_bytes": "Used", "memory_total_bytes": "Memory",
        "temperature_c": "Celsius", "power_w": "Watts", "ecc_corrected": "ECC corrected",
        "ecc_uncorrected": "Uncorrected", "xids": "Xid", "pcie_replays": "PCIe replays",
        "age_s": "Reading age", "reason": "Reason",
    }), "No worker has a GPU."),
    Table("processes", "processes", "Gateway processes", _columns(ProcessStatus, {
        "process": "Process", "state": "State", "starts": "Starts", "uptime_s": "Uptime",
        "loop_lag_p50_ms": "Loop lag p50 ms", "loop_lag_p99_ms": "p99 ms",
        "resident_bytes": "Memory", "streams": "Streams", "calls": "Calls",
    })),
    Table("memory", "memory", "Memory", _columns(MemoryStatus, {
        "name": "Memory", "process": "Process", "used_bytes": "Used", "limit_bytes": "Limit",
        "count": "In use", "huge_bytes": "Huge pages", "locked": "Locked",
    })),
    Table("events", "events", "Events", _columns(Event, {
        "at_s": "Time (UTC)", "process": "Process", "level": "Level", "text": "Event",
    }), "No event since the start."),
)  # fmt: skip
