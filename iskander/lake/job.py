"""Description of one scoring job: model, inputs, output and options.

Pure, except for the default of `concurrency`. Runs in: the operator's tool.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

from iskander.errors import ConfigError

STREAM = "-"
"""Name of an input or output that is an Arrow IPC stream on standard input or output."""
QUARANTINE: Final = "quarantine="
PARENT: Final = "_iskander"
"""Name of the folder with the state folders of jobs, beside their outputs."""
OVERWRITES: Final = ("error", "append", "replace")
BATCH_ROWS_MAX: Final = 1 << 24
CONCURRENCY_MAX: Final = 256
STREAMS_MAX: Final = 8
"""Largest default of `concurrency`."""
UNIT_BYTES: Final = 128 << 20
FILE_BYTES: Final = 256 << 20
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def default_concurrency() -> int:
    """Return the number of cores of this process, at least 2 and at most `STREAMS_MAX`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(max(cores or 1, 2), STREAMS_MAX)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One scoring job.

    Attributes:
        model: Name of the model.
        version: Version of the model; None: the server selects it when the job is planned.
        inputs: Paths, globs, folders, URIs, or `-`.
        output: Path or URI, or `-`.
        columns: Name of the model's input to name of the job's column, where they differ.
        keep: Columns of the job's input that are in the output beside the results; None: all
            columns.
        filter: Condition that a row of the input must meet to be scored.
        limit: Number of rows to score, in the order of the plan and after the filter.
        batch_rows: Rows of one record batch that is read.
        concurrency: Units (parts of the input) that are scored at the same time, each on one
            stream. By default one for each core of this process, 2 to `STREAMS_MAX`.
        unit_bytes: Approximate input bytes of one unit.
        on_error: `fail`, `null`, or `quarantine=FOLDER`.
        partition_by: Columns of the output that become hive folders.
        sort_by: Columns by which the whole output is sorted.
        file_bytes: Approximate bytes of one output file.
        compression: Compression of the output; None is the default of its format.
        overwrite: What to do if the output exists: `error`, `append` or `replace`.
        resume: Fail unless the state folder has an earlier run of this job.
        restart: Delete the state of an earlier run.
        unattended: Do nothing if the output has exactly these results. Delete the state of an
            earlier run with another input or model, unless that run has begun to commit.
        state: State folder; None is the default of `state_folder`.
        plain_files: Read the files of a table as plain files.
    """

    model: str
    inputs: tuple[str, ...]
    output: str
    version: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] | None = None
    filter: str | None = None
    limit: int | None = None
    batch_rows: int = 8192
    concurrency: int = field(default_factory=default_concurrency)
    unit_bytes: int = UNIT_BYTES
    on_error: str = "fail"
    partition_by: tuple[str, ...] = ()
    sort_by: tuple[str, ...] = ()
    file_bytes: int = FILE_BYTES
    compression: str | None = None
    overwrite: str = "error"
    resume: bool = False
    restart: bool = False
    unattended: bool = False
    state: str | None = None
    plain_files: bool = False

    def __post_init__(self) -> None:
        """Check each option and the options that exclude each other."""
        _require(bool(self.model), "model is empty; give the name of a model")
        _require(bool(self.inputs), "no input; give at least one file, folder, table or `-`")
        _require(all(self.inputs), "an input is empty; give a file, folder, table or `-`")
        _require(bool(self.output), "output is empty; give a file, folder, table or `-`")
        _require_range("limit", self.limit, 1, None)
        _require_range("batch_rows", self.batch_rows, 1, BATCH_ROWS_MAX)
        _require_range("concurrency", self.concurrency, 1, CONCURRENCY_MAX)
        _require_range("unit_bytes", self.unit_bytes, 1, None)
        _require_range("file_bytes", self.file_bytes, 1, None)
        _require(
            self.on_error in ("fail", "null") or bool(self.quarantine),
            f"on_error is {self.on_error!r}; expected fail, null or quarantine=FOLDER",
        )
        _require(
            self.overwrite in OVERWRITES,
            f"overwrite is {self.overwrite!r}; expected {', '.join(OVERWRITES)}",
        )
        _require(
            self.resume + self.restart + self.unattended <= 1,
            "resume, restart and unattended exclude each other",
        )
        _require(
            STREAM not in self.inputs or len(self.inputs) == 1,
            "standard input (`-`) cannot be combined with other inputs",
        )
        _require(
            not (self.resume and self.is_stream),
            "resume needs files or tables; a stream (`-`) cannot be read or written twice",
        )

    @property
    def quarantine(self) -> str | None:
        """Folder for the rows that the server rejects; None unless `on_error` names one."""
        if self.on_error.startswith(QUARANTINE):
            return self.on_error.removeprefix(QUARANTINE)
        return None

    @property
    def is_stream(self) -> bool:
        """Whether the input or the output is a stream, so that the job cannot be resumed."""
        return STREAM in (*self.inputs, self.output)

    @property
    def state_folder(self) -> str:
        """Folder for the plan and the journal.

        By default it is `_iskander/NAME`, beside a local output, or in the working folder for any
        other output. The name does not contain the fingerprint, so a changed job finds the state of
        the earlier job and is rejected.
        """
        if self.state is not None:
            return self.state
        if _SCHEME.match(self.output) or self.output == STREAM:
            digest = hashlib.sha256(self.output.encode("utf-8", "surrogatepass")).hexdigest()
            label = re.sub(r"[^A-Za-z0-9]+", "-", self.output).strip("-")[-40:]
            return str(PurePath(PARENT, f"{label or 'stream'}-{digest[:8]}"))
        path = PurePath(self.output)
        return str(path.parent / PARENT / (path.name or "output"))

    def fingerprint_options(self) -> dict[str, Any]:
        """Return the options that change results or the files of the output.

        The inputs are left out, because the snapshot of the source describes what they contain.
        Concurrency and the policy for an existing output are left out too: they change no result.
        """
        return {
            "output": self.output,
            "columns": dict(self.columns),
            "keep": None if self.keep is None else list(self.keep),
            "filter": self.filter,
            "limit": self.limit,
            "batch_rows": self.batch_rows,
            "unit_bytes": self.unit_bytes,
            "on_error": self.on_error,
            "partition_by": list(self.partition_by),
            "sort_by": list(self.sort_by),
            "file_bytes": self.file_bytes,
            "compression": self.compression,
        }


def _require(is_valid: bool, text: str) -> None:
    if not is_valid:
        raise ConfigError(text)


def _require_range(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None:
        return
    _require(value >= low, f"{name} is {value}; expected at least {low}")
    _require(high is None or value <= high, f"{name} is {value}; expected at most {high}")
