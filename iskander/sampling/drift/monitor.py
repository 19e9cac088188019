"""Drift of one model version: its recent samples, its reference, and its recording of one.

Runs on: the observer process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import pyarrow as pa

from iskander.config.drift import DriftConfig, Origin
from iskander.contract.manifest import Manifest, read_manifest
from iskander.contract.paths import existing_inside
from iskander.errors import IskanderError
from iskander.foundation.clock import NS_PER_S
from iskander.foundation.logs import observation as log
from iskander.gateway.observation.drift_report import (
    PROBLEM_CHARACTERS,
    QUANTILES,
    STATES,
    ColumnDrift,
    ModelDrift,
    SideSummary,
    shorten,
)
from iskander.sampling.drift.columns import columns_of
from iskander.sampling.drift.comparison import compare
from iskander.sampling.drift.profile import ColumnKey, Profile
from iskander.sampling.drift.reference import (
    FILE,
    InvalidReference,
    read_reference,
    to_profile,
    to_reference,
    write_reference,
)
from iskander.sampling.drift.summary import Summary
from iskander.sampling.drift.warm_up import packed_names, read_warm_up
from iskander.sampling.drift.window import STEPS, Window

Found = TypeVar("Found")

LABELS_LISTED: Final = 5
SIDES: Final = ("input", "output")


class ModelMonitor:
    """Summarizes the samples of a model version and compares them with its reference.

    The reference is the first one of `drift.references` that exists. Without one, the first
    `drift.record_rows` rows are recorded, if `live` is among them.

    Args:
        model: Name of the model.
        version: Its version.
        config: Settings.
        columns_max: Columns to summarize.
        model_folder: Folder of the model's files.
        recording_file: File of the recorded reference.

    Attributes:
        sampled_ns: Time of the last sample.
    """

    def __init__(
        self,
        model: str,
        version: str,
        config: DriftConfig,
        columns_max: int,
        model_folder: Path,
        recording_file: Path,
    ) -> None:
        self.sampled_ns = 0
        self._model, self._version = model, version
        self._config = config
        self._columns_max = columns_max
        self._model_folder = model_folder
        self._recording_file = recording_file
        step_ns = int(config.window_s * NS_PER_S / STEPS)
        self._window = Window(step_ns, columns_max)
        self._reference: Profile | None = None
        self._origin: Origin = "live"
        self._recording: Profile | None = None
        self._problem = self._write_problem = ""
        self._packed: dict[str, tuple[str, ...]] = {}
        self._files: tuple[object, ...] = ()
        self.reload()

    @property
    def columns(self) -> int:
        """Number of summarized columns."""
        return self._window.columns

    def add(self, now_ns: int, inputs: pa.RecordBatch, outputs: pa.RecordBatch) -> None:
        """Summarize the inputs and outputs of a sample."""
        self.sampled_ns = now_ns
        rows = inputs.num_rows
        columns = [
            (ColumnKey(side, name), values)
            for side, batch in zip(SIDES, (inputs, outputs), strict=True)
            for name, values in columns_of(batch, self._packed)
        ]
        self._window.add(now_ns, rows, columns)
        if self._recording is not None:
            self._recording.add(rows, columns)
            if self._recording.rows >= self._config.record_rows:
                self._finish_recording(now_ns)

    def reload(self) -> None:
        """Read the reference again if one of its files has changed."""
        files = self._identify_files()
        if files == self._files:
            return
        self._files, self._problem, self._reference = files, "", None
        manifest = self._tried(lambda: read_manifest(self._model_folder))
        self._packed = {} if manifest is None else packed_names(manifest)
        readers: dict[Origin, Callable[[], Profile | None]] = {
            "training": self._read_training,
            "warm-up": lambda: self._read_warm_up(manifest),
            "live": self._read_recorded,
        }
        for origin in self._config.references:
            self._reference = self._tried(readers[origin])
            if self._reference is not None:
                self._origin, self._recording = origin, None
                return
        if self._recording is None and "live" in self._config.references:
            self._recording = Profile(self._columns_max)

    def save(self, now_ns: int) -> None:
        """Store an unfinished recording, to continue it after a restart."""
        self.reload()  # Another gateway process may have completed one.
        if self._recording is not None and self._recording.rows:
            self._write(self._recording, now_ns, is_complete=False)

    def compare(self, now_ns: int) -> ModelDrift:
        """Compare the recent samples with the reference."""
        self._window.expire(now_ns)
        recent, reference = self._window.total(), self._reference
        columns = [
            self._compare(key, summary, None if reference is None else reference.summaries.get(key))
            for key, summary in recent.summaries.items()
        ]
        columns.sort(key=lambda column: -column.severity)
        states = {side: dict.fromkeys(STATES, 0) for side in SIDES}
        for column in columns:
            states[column.side][column.state] += 1
        source = reference if reference is not None else self._recording
        origin = "" if source is None else "recording" if reference is None else self._origin
        return ModelDrift(
            model=self._model,
            version=self._version,
            reference=origin,
            problem=(self._problem or self._write_problem)[:PROBLEM_CHARACTERS],
            reference_rows=0 if source is None else source.rows,
            rows=recent.rows,
            states=states,
            left_out=recent.left_out,
            columns=tuple(columns[: self._config.columns_listed]),
        )

    def _compare(self, key: ColumnKey, recent: Summary, reference: Summary | None) -> ColumnDrift:
        measures = {} if reference is None else compare(recent, reference, self._config)
        ranked = sorted(measures, key=lambda name: -measures[name].severity)
        exceeded = tuple(name for name in ranked if measures[name].severity > 1)
        return ColumnDrift(
            side=key.side,
            column=shorten(key.name),
            state="drifting" if exceeded else "steady" if measures else "unjudged",
            exceeded=exceeded,
            severity=round(measures[ranked[0]].severity, 4) if ranked else 0.0,
            measures={name: round(measure.value, 6) for name, measure in measures.items()},
            recent=_shown(recent),
            reference=None if reference is None else _shown(reference),
        )

    def _tried(self, read: Callable[[], Found | None]) -> Found | None:
        """Read a file; after an error, keep its text and return None."""
        try:
            return read()
        except IskanderError as error:
            self._problem = self._problem or error.message
            return None

    def _read_training(self) -> Profile | None:
        file = existing_inside(self._model_folder, FILE)
        stored = None if file is None else read_reference(file)
        return None if stored is None else to_profile(stored, self._columns_max)

    def _read_warm_up(self, manifest: Manifest | None) -> Profile | None:
        """Summarize the recorded batches of the manifest, if they have enough rows."""
        if manifest is None:
            return None
        profile = read_warm_up(self._model_folder, manifest, self._columns_max)
        return profile if profile is not None and profile.rows >= self._config.rows_min else None

    def _read_recorded(self) -> Profile | None:
        """Read the recorded reference, or continue its recording."""
        stored = read_reference(self._recording_file)
        profile = None if stored is None else to_profile(stored, self._columns_max)
        if stored is None or stored.is_complete:
            self._recording = None
            return profile
        if self._recording is None:
            self._recording = profile
        return None

    def _identify_files(self) -> tuple[object, ...]:
        """Identify the present contents of the files that decide on the reference."""
        beside = (self._model_folder / name for name in (FILE, "manifest.toml"))
        return tuple(_identity(file) for file in (*beside, self._recording_file))

    def _finish_recording(self, now_ns: int) -> None:
        self.reload()  # As in `save`.
        recording, self._recording = self._recording, None
        if recording is None:
            return
        self._reference, self._origin = recording, "live"
        title = f"{self._model}/{self._version}"
        log.drift_reference_recorded(model=title, rows=recording.rows)
        self._write(recording, now_ns, is_complete=True)

    def _write(self, profile: Profile, now_ns: int, *, is_complete: bool) -> None:
        reference = to_reference(
            profile,
            self._model,
            self._version,
            origin="live",
            is_complete=is_complete,
            created_s=now_ns // NS_PER_S,
        )
        try:
            write_reference(self._recording_file, reference)
        except InvalidReference as error:
            self._write_problem = error.message
        else:
            self._write_problem = ""
        self._files = self._identify_files()


def _identity(file: Path) -> tuple[int, int, int] | None:
    """Identify the present content of a file; None without a file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _shown(summary: Summary) -> SideSummary:
    has_numbers = summary.numbers > 0
    labels: dict[str, float] = {}
    if summary.labels is not None and summary.is_labels:
        counts = list(summary.labels.counts().items())[:LABELS_LISTED]
        labels = {label: round(count / len(summary.labels), 6) for label, count in counts}
    return SideSummary(
        count=summary.total,
        missing=round(summary.missing_share, 6),
        mean=summary.mean if has_numbers else None,
        deviation=summary.deviation if has_numbers else None,
        quantiles=tuple(summary.quantiles.at(QUANTILES)),
        labels=labels,
    )
