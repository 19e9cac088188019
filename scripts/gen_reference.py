"""Write the pages and files that are made from declarations; `--check` says which are stale.

docs/reference/configuration.md   from iskander/config/schema.py and config_models.py
docs/reference/errors.md          from iskander/errors.py
docs/reference/messages.md        from iskander/control/messages.py
docs/reference/lifecycle.md       from iskander/supervision/lifecycle.py
docs/reference/metrics.md         from iskander/telemetry/metrics.py
docs/reference/manifest.md         from iskander/contract/manifest.py and outputs.py
docs/reference/manifest.schema.json  the same for other programs
configs/iskander.toml             every setting at its default
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from iskander import errors
from iskander.config.reference import (
    Setting,
    model_file_settings,
    render_reference,
    render_value,
    settings,
)
from iskander.contract.manifest_schema import TABLES, keys_of, manifest_schema
from iskander.control import messages
from iskander.supervision import lifecycle
from iskander.telemetry import aggregate as merged
from iskander.telemetry import metrics

ROOT = Path(__file__).resolve().parent.parent
MADE_BY = "<!-- Made by scripts/gen_reference.py; change the declaration instead. -->"


def pages() -> dict[str, str]:
    """Text of each file, by its path from the repository's root."""
    return {
        "docs/reference/configuration.md": configuration(),
        "docs/reference/errors.md": error_table(),
        "docs/reference/messages.md": message_table(),
        "docs/reference/lifecycle.md": lifecycle_table(),
        "docs/reference/metrics.md": metrics_table(),
        "docs/reference/manifest.md": manifest_tables(),
        "docs/reference/manifest.schema.json": json.dumps(manifest_schema(), indent=1) + "\n",
        "configs/iskander.toml": render_reference(),
    }


def configuration() -> str:
    """Every setting, and what a model of the repository may say of itself."""
    head = [
        "# Configuration",
        "",
        MADE_BY,
        "",
        "Precedence: default < file < environment (`ISKANDER_SECTION__KEY`) < `--set`.",
        "`models` is a list: one `[[models]]` table for each model version.",
        "",
        *_setting_rows(settings()),
        "",
        "## `model.toml`",
        "",
        "Beside the versions of a model in the [repository](../repository.md): the settings of",
        "`[[models]]` but `name`, `path` and `version`, and these.",
        "",
        *_setting_rows(model_file_settings()),
    ]
    return "\n".join(head) + "\n"


def _setting_rows(found: Iterable[Setting]) -> list[str]:
    rows = [
        f"| `{s.path}` | {_cell(s.type)} | "
        f"{'' if s.default is None else f'`{render_value(s.default)}`'} | {_cell(s.sentence)} |"
        for s in found
    ]
    return ["| setting | type | default | meaning |", "|---|---|---|---|", *rows]


def error_table() -> str:
    """Every named error."""
    kinds = [errors.IskanderError, *errors.IskanderError._by_code.values()]
    kinds.sort(key=lambda kind: kind.code)
    rows = [
        f"| `{kind.code}` | {kind.fault.value} | {'yes' if kind.retryable else 'no'} | "
        f"{kind.status} | {kind.flight_status or kind.status} | {kind.http_status} | "
        f"{_first_line(kind)} |"
        for kind in kinds
    ]
    head = [
        "# Errors",
        "",
        MADE_BY,
        "",
        "Trailers of a failed call: `iskander-code`, `iskander-fault`, `iskander-retryable`,",
        "`iskander-retry-after-ms` where a time is known, and `grpc-status-details-bin`: over",
        "Flight all of it as JSON, which pyarrow gives its users as the `extra_info` of every",
        "`FlightError` (`ArrowInvalid` and its like have no room for it), else a",
        "`google.rpc.Status` with a `google.rpc.ErrorInfo` of the domain `iskander` as its detail,",
        "which has it as metadata, each value as text. Over HTTP the body has it.",
        "",
        "| code | whose fault | retry | gRPC | Flight | HTTP | when |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def message_table() -> str:
    """Every control message."""
    lines = ["# Control messages", "", MADE_BY, "", inspect.getdoc(messages) or "", ""]
    lines[4] = "```text\n" + lines[4] + "\n```"
    for name, kind in vars(messages).items():
        if not inspect.isclass(kind) or not issubclass(kind, msgspec.Struct):
            continue
        if kind.__module__ != messages.__name__ or kind.__name__ != name:
            continue
        sentence, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
        meanings = dict(re.findall(r"^ {4}(\w+): (.*)$", attributes, re.MULTILINE))
        lines += [f"## {kind.__name__}", "", sentence, ""]
        for field in msgspec.structs.fields(kind):
            line = f"- `{field.name}`: `{_type_name(field.type)}`"
            lines.append(f"{line}. {meanings[field.name]}" if field.name in meanings else line)
        lines.append("")
    return "\n".join(lines)


def lifecycle_table() -> str:
    """The tables of a worker's life."""
    lifecycle.validate()
    rows = [
        f"| {state} | {event} | {after} | {', '.join(actions) or 'nothing'} |"
        for (state, event), (after, actions) in lifecycle.TABLE.items()
    ]
    ignored = [
        f"- {state}: {', '.join(e for e in lifecycle.Event if (state, e) in lifecycle.IGNORED)}"
        for state in lifecycle.State
    ]
    head = [
        "# Life of a worker",
        "",
        MADE_BY,
        "",
        "From every state there is a way back to ready or, after a stop, to stopped. Every pair of",
        "state and event is either in the table or in the list below it.",
        "",
        "| state | event | becomes | and then |",
        "|---|---|---|---|",
    ]
    tail = [
        "",
        "What is ignored, because it was overtaken by another event or has no meaning there:",
        "",
    ]
    return "\n".join([*head, *rows, *tail, *ignored]) + "\n"


def metrics_table() -> str:
    """Every metric of the page `/metrics`."""
    lines = [
        "# Metrics",
        "",
        MADE_BY,
        "",
        "Read from `/metrics` at `admin.address`, as Prometheus text or OpenMetrics. Counters and",
        "histograms are since the start of the gateway. The Flight action `metrics` answers from",
        "the last points of each measure instead.",
    ]
    for scope, scope_labels, declared in metrics.SCOPES:
        names = ", ".join(f"`{label}`" for label in scope_labels)
        lines += ["", f"## Of {'the' if not names else 'each'} {scope}", ""]
        lines += [f"Labels of all: {names}.", ""] if names else []
        lines += ["| metric | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
        lines += [
            f"| `{metric.name}` | {metric.kind} | {metric.unit} | "
            f"{', '.join(f'`{label}`' for label in metric.labels)} | {_cell(metric.sentence)} |"
            for metric in declared
        ]
    lines += [
        "",
        "## Of each process, where there are several",
        "",
        "With `server.processes` above 1 all of the others have the label `process`, too.",
        "",
        "| metric | kind | unit | labels | meaning |",
        "|---|---|---|---|---|",
        f"| `iskander_process_up` | gauge |  | `process` | {merged.UP} |",
        f"| `iskander_process_starts_total` | counter |  | `process` | {merged.STARTS} |",
    ]
    return "\n".join(lines) + "\n"


def manifest_tables() -> str:
    """Every key of a manifest."""
    lines = [
        "# Manifest",
        "",
        MADE_BY,
        "",
        "`manifest.toml` beside a model. What its keys do together is on the pages",
        "[models](../models.md), [loading](../loading.md) and [backends](../backends.md). Other",
        "programs have [a JSON schema](manifest.schema.json), which `iskander manifest --schema`",
        "prints, too. A key without a default has to be there.",
    ]
    for name, table in TABLES.items():
        title = "At the top" if name == "manifest" else f"`{name}`"
        lines += ["", f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{key.name}` | {_cell(key.type)} | "
            f"{f'`{key.default}`' if key.default else '' if key.default is None else '-'} | "
            f"{_cell(key.sentence)} |"
            for key in keys_of(table)
        ]
    return "\n".join(lines) + "\n"


def _first_line(kind: type) -> str:
    return (inspect.getdoc(kind) or "").split("\n", 1)[0]


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("iskander.", "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description="Write the generated pages.")
    parser.add_argument("--check", action="store_true", help="only compare with what is there")
    is_check = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        path = ROOT / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if is_check and stale:
        sys.exit(f"stale, run `make docs`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
