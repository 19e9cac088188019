"""Prediction log: the consumer that writes sampled requests to Parquet files.

Runs on: the observer process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from iskander.config.models import ModelConfig
from iskander.config.observation import PredictionLogConfig
from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.observation.sampling import is_within, threshold_of
from iskander.sampling.prediction_log.columns import Columns
from iskander.sampling.prediction_log.counts import UNKNOWN_COLUMN, Counts
from iskander.sampling.prediction_log.delivery import Delivery, LocalFolder, Uploads
from iskander.sampling.prediction_log.hashing import read_key
from iskander.sampling.prediction_log.layout import partition_of
from iskander.sampling.prediction_log.workspace import Workspace
from iskander.sampling.prediction_log.writer import Rows, Writer
from iskander.sampling.sample import Sample

CLOSE_S: Final = 6.0
"""Timeout for the last files; those of an object store are uploaded after the next start."""
HIDDEN: Final = ".writing"
"""Folder of incomplete files in a local log; readers of `*/*.parquet` do not see it."""
FORMS_MAX: Final = 4096


class PredictionLog:
    """`sample.Consumer` of `[prediction_log]`.

    Args:
        config: Settings of the log.
        models: Settings of the models, by name and version.

    Raises:
        ConfigError: The key cannot be read.
        OSError: The folder cannot be written.
    """

    def __init__(
        self, config: PredictionLogConfig, models: Mapping[tuple[str, str], ModelConfig]
    ) -> None:
        self._models = models
        self._key = read_key(Path(config.key_file)) if config.key_file else b""
        self._counts = Counts()
        self._forms: dict[tuple[Any, ...], Columns | None] = {}
        root = Path(config.path.removeprefix("file://"))
        workspace = Workspace(Path(config.spool) if config.is_remote else root / HIDDEN)
        self._delivery: Delivery
        if config.is_remote:
            self._delivery = Uploads(config.path, workspace, config.spool_bytes, self._counts)
        else:
            self._delivery = LocalFolder(root, self._counts)
        self._writer = Writer(config, workspace, self._delivery, self._counts)

    def consume(self, sample: Sample) -> None:
        """Queue the rows of a sample."""
        settings = self._models[sample.model, sample.version].prediction_log
        if not is_within(int(sample.trace_id, 16), threshold_of(settings.share)):
            return  # Another consumer's share is larger.
        columns = self._columns_of(sample)
        if columns is None:
            self._counts.on_dropped(UNKNOWN_COLUMN)
            return
        partition = partition_of(sample.model, sample.version, sample.time_ns)
        self._writer.put(Rows(partition, columns.rows_of(sample)))

    def tick(self, now_ns: int) -> None:
        """Do nothing: the writer has its own thread."""

    def report(self) -> dict[str, Any]:
        """Return counters, the last error, and bytes that are not in a file."""
        return {**self._counts.report(), "buffered_bytes": self._writer.buffered_bytes}

    def close(self) -> None:
        """Complete all files."""
        deadline_ns = now_ns() + int(CLOSE_S * NS_PER_S)
        self._writer.close(deadline_ns)
        self._delivery.close(deadline_ns)

    def _columns_of(self, sample: Sample) -> Columns | None:
        """Columns of a model's files; None if its settings name an unknown column."""
        settings = self._models[sample.model, sample.version].prediction_log
        names = (*sample.inputs.schema.names, *sample.outputs.schema.names)
        key = (sample.model, sample.version, settings, names, sample.inputs.num_columns)
        if key not in self._forms:
            if len(self._forms) >= FORMS_MAX:
                self._forms.clear()
            try:
                self._forms[key] = Columns(sample, settings, self._key)
            except ConfigError as error:
                self._forms[key] = None
                self._counts.on_failure(error.message)
        return self._forms[key]
