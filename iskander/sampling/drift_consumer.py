"""Consumer that compares the samples of each model version with its reference.

Runs on: the observer process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from iskander.config.drift import DriftConfig
from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.contract.manifest import model_file
from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_S
from iskander.foundation.clock import now_ns as monotonic_ns
from iskander.gateway.observation.drift_report import MODELS_MAX, DriftReport, limited
from iskander.gateway.observation.sampling import is_within, threshold_of
from iskander.sampling.drift.monitor import ModelMonitor
from iskander.sampling.drift.window import STEPS
from iskander.sampling.sample import Sample

COLUMNS_MAX: Final = 1024
"""Summarized columns of all model versions. One takes up to 75 kB, or 180 kB with long labels."""
COMPARISONS: Final = 10
"""Comparisons in one step of the window."""
COMPARE_S: Final = (0.5, 60.0)
"""Least and greatest time between two comparisons."""
COMPARE_TIMES: Final = 20
"""Least time between two comparisons, in run times of one: at most 5 % of a core."""
RELOAD_NS: Final = 5 * NS_PER_S
SAVE_NS: Final = 60 * NS_PER_S
IDLE_WINDOWS: Final = 2
"""Windows without a sample after which a model version is forgotten."""

Key = tuple[str, str]


class DriftConsumer:
    """Summarizes and compares samples.

    Args:
        config: Settings.
        folder: Folder of recorded references.
        models: Settings of the model versions of samples.
    """

    def __init__(
        self, config: DriftConfig, folder: Path, models: Mapping[Key, ModelConfig]
    ) -> None:
        self._config = config
        self._folder = folder
        self._models = models
        self._monitors: dict[Key, ModelMonitor] = {}
        self._left_out: set[Key] = set()
        self._report = DriftReport()
        self._counts = {"samples": 0, "rows": 0}
        self._run_ns = 0
        self._now_ns = self._compared_ns = self._reloaded_ns = self._saved_ns = 0
        least, greatest = COMPARE_S
        interval_s = config.window_s / STEPS / COMPARISONS
        self._interval_ns = int(min(max(interval_s, least), greatest) * NS_PER_S)

    def consume(self, sample: Sample) -> None:
        """Summarize a sample, if it is within the share of its model."""
        key = sample.model, sample.version
        settings = self._models[key]
        if not is_within(int(sample.trace_id, 16), threshold_of(settings.drift.share)):
            return
        monitor = self._monitors.get(key) or self._open(key, settings)
        if monitor is not None:
            monitor.add(self._now_ns or sample.time_ns, sample.inputs, sample.outputs)
            self._counts["samples"] += 1
            self._counts["rows"] += sample.rows

    def tick(self, now_ns: int) -> None:
        """Compare, read changed references, store recordings, and forget idle model versions."""
        self._now_ns = now_ns
        if self._is_due(self._compared_ns, max(self._interval_ns, COMPARE_TIMES * self._run_ns)):
            self._compared_ns, started_ns = now_ns, monotonic_ns()
            self._forget_idle()
            self._compare()
            self._run_ns = monotonic_ns() - started_ns
        if self._is_due(self._reloaded_ns, RELOAD_NS):
            self._reloaded_ns = now_ns
            for monitor in self._monitors.values():
                monitor.reload()
        if self._is_due(self._saved_ns, SAVE_NS):
            self._saved_ns = now_ns
            self._save()

    def report(self) -> dict[str, Any]:
        """Return the last comparison, a `DriftReport`."""
        built: dict[str, Any] = msgspec.to_builtins(self._report)
        return built

    def close(self) -> None:
        """Store the unfinished recordings."""
        self._save()

    def _is_due(self, last_ns: int, interval_ns: int) -> bool:
        """Whether an interval has passed, or the clock was set back."""
        return not 0 <= self._now_ns - last_ns < interval_ns

    def _open(self, key: Key, settings: ModelConfig) -> ModelMonitor | None:
        """Begin to monitor a model version, within the limits."""
        model, version = key
        free = COLUMNS_MAX - sum(monitor.columns for monitor in self._monitors.values())
        if len(self._monitors) == MODELS_MAX or free <= 0:
            if len(self._left_out) < MODELS_MAX:
                self._left_out.add(key)
            return None
        self._left_out.discard(key)
        monitor = self._monitors[key] = ModelMonitor(
            model,
            version,
            self._config,
            min(self._config.columns, free),
            model_file(Path(settings.path), settings.backend).parent,
            recording_file(self._folder, model, version),
        )
        return monitor

    def _compare(self) -> None:
        models = [monitor.compare(self._now_ns) for monitor in self._monitors.values()]
        self._report = DriftReport(
            models=limited(models),
            left_out=len(self._left_out),
            counts=dict(self._counts),
            failure=next((f"{m.model}/{m.version}: {m.problem}" for m in models if m.problem), ""),
        )

    def _forget_idle(self) -> None:
        idle_ns = int(IDLE_WINDOWS * self._config.window_s * NS_PER_S)
        for key, monitor in list(self._monitors.items()):
            if self._now_ns - monitor.sampled_ns > idle_ns:
                monitor.save(self._now_ns)
                del self._monitors[key]
                self._left_out.clear()

    def _save(self) -> None:
        for monitor in self._monitors.values():
            monitor.save(self._now_ns)


def references_folder(config: Config) -> Path:
    """Return the folder of recorded references.

    Raises:
        ConfigError: It has no place.
    """
    folder, cache = config.drift.folder, config.loading.cache_folder()
    if not folder and not cache:
        raise ConfigError("drift.folder has no default: neither loading.cache nor HOME is set")
    return Path(folder or f"{cache}/drift")


def recording_file(folder: Path, model: str, version: str) -> Path:
    """Return the file of a model version's recorded reference."""
    return folder / f"{quote(model, safe='')}@{quote(version, safe='')}.msgpack"
