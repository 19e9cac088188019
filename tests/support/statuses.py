"""Status documents for tests of the page."""

from __future__ import annotations

from typing import Any

from iskander.gateway.telemetry.page.plots import PLOTS
from iskander.gateway.telemetry.status.document import (
    MemoryStatus,
    ModelStatus,
    ProcessStatus,
    Status,
)
from iskander.gateway.telemetry.status.events import Event
from iskander.gateway.telemetry.status.stats import WorkerStats

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}",
    "</style></table></script><!--",
    "\u202egnp.exe",
    "javascript:alert(1)",
)


def status(**fields: Any) -> Status:
    values: dict[str, Any] = {
        "version": "1.2.3",
        "build": "compiled",
        "started_ms": 5,
        "uptime_s": 90.0,
        "ready": True,
        "reasons": [],
        "interval_s": 2,
        "processes": [ProcessStatus(process=0, state="ready")],
        "models": [],
        "workers": [],
        "memory": [MemoryStatus(name="input arena", process=0, used_bytes=0)],
        "events": [],
        "left_out": {},
    }
    return Status(**{**values, **fields})


def hostile(text: str) -> Status:
    """A status with a text in every place of a model, an error or an operator."""
    series = {measure: [1.0, None, 2.0] for plot in PLOTS for _, measure in plot.lines}
    model = ModelStatus(
        name=text,
        version=text,
        state=text,
        reason=text,
        refusals={text: 1},
        failures={text: 1},
        series=series,  # type: ignore[arg-type]
    )
    worker = WorkerStats(
        index=0,
        group=0,
        pool=text,
        cpus=(0,),
        device_error=text,
        load_step=text,
        state=text,
        incarnation=1,
        pid=1,
        batches=0,
        in_flight=0,
        credits=0,
        starts=1,
        failures=0,
        ends={text: 1},
        looping=False,
        output_leased_bytes=0,
        notices=(text,),
        resident_bytes=0,
        history=(),
    )
    return status(
        version=text,
        ready=False,
        reasons=[text],
        models=[model],
        workers=[worker],
        events=[Event(at_s=1.0, level=text, text=text)],
        memory=[MemoryStatus(name=text, process=0, used_bytes=0)],
    )
