"""Admin pages of a gateway of several processes, merged from the pages of the processes.

`/metrics` has the metrics of each process with a label `process`. Sum the metrics of lanes and
streams; those of workers are each process's view of the same workers. A process without a response
in time is missing, and its `iskander_process_up` is 0. The configuration is reloaded by the parent.

Runs on: the parent's loop.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from iskander.foundation.clock import NS_PER_S
from iskander.foundation.file_watcher import ReloadStatus

if TYPE_CHECKING:
    from iskander.gateway.child import ChildProcess

ANSWER_S = 2.0
PAGE_BYTES_MAX = 64 << 20

UP = "Whether the gateway process answered."
STARTS = "Starts of the gateway process."
RELOAD_VALID = (
    "Whether the last read of a file was successful: configuration (SIGHUP), tokens, or tls "
    "(certificate, key and client CA). After a failure, the previous files stay in use."
)
RELOAD_VALID_AT = "Unix time of the last successful read of a file."

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores the proxies of the environment, which cannot reach ports of this machine."""


async def render(
    processes: Sequence[ChildProcess], reloads: ReloadStatus, is_openmetrics: bool
) -> bytes:
    """Render the merged page for Prometheus; `reloads` are those of the configuration."""
    fetches = (asyncio.to_thread(fetch, each.admin_address, "/metrics") for each in processes)
    texts = await asyncio.gather(*fetches)
    families: dict[str, Metric] = {}
    up = GaugeMetricFamily("iskander_process_up", UP, labels=["process"])
    starts = CounterMetricFamily("iskander_process_starts", STARTS, labels=["process"])
    for process, text in zip(processes, texts, strict=True):
        index = str(process.index)
        up.add_metric([index], float(bool(text)))
        starts.add_metric([index], float(process.starts))
        _add(families, text, index)
    families |= {up.name: up, starts.name: starts}
    for name, text, value in (
        ("iskander_reload_valid", RELOAD_VALID, float(reloads.is_valid)),
        ("iskander_reload_valid_timestamp_seconds", RELOAD_VALID_AT, reloads.valid_ns / NS_PER_S),
    ):
        family = families.setdefault(name, Metric(name, text, "gauge"))
        family.add_sample(name, {"file": "configuration"}, value)
    generate = openmetrics.generate_latest if is_openmetrics else exposition.generate_latest
    registry = cast(Any, SimpleNamespace(collect=families.values))
    return await asyncio.to_thread(generate, registry)


def _add(families: dict[str, Metric], text: str, process: str) -> None:
    """Add the samples of a page to the families by name."""
    for family in text_string_to_metric_families(text):
        empty = Metric(family.name, family.documentation, family.type, family.unit)
        families.setdefault(family.name, empty).samples += [
            Sample(name, {**labels, "process": process}, value, timestamp, exemplar)
            for name, labels, value, timestamp, exemplar, *_ in family.samples
        ]


def fetch(address: str, path: str) -> str:
    """Fetch a page of a process; empty on failure."""
    if not address:
        return ""
    try:
        with _OPENER.open(f"http://{address}{path}", timeout=ANSWER_S) as response:
            text: str = response.read(PAGE_BYTES_MAX).decode()
    except (OSError, ValueError, HTTPException):
        return ""
    return text
