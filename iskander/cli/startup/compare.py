"""`iskander models compare`: results of the shadow versions of a model beside those served.

Reads the status document at `admin.address`, in which all processes of a gateway are merged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from iskander.cli import command
from iskander.cli.command import print_lines
from iskander.cli.tables import Row, format_count, printable, render_table
from iskander.errors import ConnectionFailed, ModelNotFound
from iskander.foundation.decoders import thread_safe
from iskander.foundation.exit_codes import ExitCode
from iskander.gateway.telemetry.status.shadow_status import (
    DifferenceStatus,
    OutputStatus,
    ShadowStatus,
)

if TYPE_CHECKING:
    from iskander.cli.command import Commands

ADMIN = "127.0.0.1:50052"
"""Default of `admin.address`."""
ANSWER_S = 10.0
PAGE_BYTES_MAX = 64 << 20
UNKNOWN = "-"


def add_command(commands: Commands) -> None:
    """Add the command."""
    sentence = "compare the results of a model's shadow versions with those of the served ones"
    parser = command.add_command(commands, "compare", run, sentence, command.add_name)
    sentence = "`admin.address` of the server, or https://HOST:PORT (default: %(default)s)"
    parser.add_argument("--admin", default=ADMIN, metavar="HOST:PORT", help=sentence)
    command.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    status, model = _read(arguments.admin), arguments.model
    shadows = [each for each in status.shadows if each.name == model]
    outputs = [each for each in status.shadow_outputs if each.name == model]
    if not shadows:
        text = f"model `{model}` has no shadow version on this server"
        raise ModelNotFound(text, model=model)
    if arguments.json:
        found = {"shadows": shadows, "shadow_outputs": outputs}
        command.print_json(msgspec.to_builtins(found, str_keys=True))
    else:
        print_lines(*render(shadows, outputs))
    return ExitCode.DONE


def render(shadows: Sequence[ShadowStatus], outputs: Sequence[OutputStatus]) -> list[str]:
    """Return the figures as tables."""
    lines: list[str] = []
    for shadow in shadows:
        own = [each for each in outputs if each.key[:3] == shadow.key]
        lines += [*_summary(shadow), "", *_tables(own), ""]
    return lines[:-1]


@thread_safe
class _Found(msgspec.Struct):
    """The part of the status document about shadow versions."""

    shadows: list[ShadowStatus] = []
    shadow_outputs: list[OutputStatus] = []


def _read(address: str) -> _Found:
    from http.client import HTTPException
    from urllib.error import URLError
    from urllib.request import ProxyHandler, build_opener

    opener = build_opener(ProxyHandler({}))  # Proxies cannot reach ports of this machine.
    try:
        with opener.open(f"http://{address}/status.json", timeout=ANSWER_S) as response:
            return msgspec.json.decode(response.read(PAGE_BYTES_MAX), type=_Found)
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise ConnectionFailed(
            f"no status at http://{address}/status.json: {reason}; it needs `admin.address`, "
            "`admin.page` and the extra `http`"
        ) from None


def _summary(shadow: ShadowStatus) -> list[str]:
    reason = f": {printable(shadow.reason)}" if shadow.reason else ""
    dropped = ", ".join(f"{key} {format_count(n)}" for key, n in sorted(shadow.dropped.items()))
    times = (_number(shadow.served_run_ms), _number(shadow.candidate_run_ms))
    return [
        f"{shadow.name}: served version {shadow.served}, shadow version {shadow.candidate}, "
        f"share {shadow.share:g}",
        f"{shadow.state}{reason}",
        f"{format_count(shadow.rows)} rows compared, {format_count(shadow.disagreeing)} "
        f"differ ({_percent(shadow.disagreeing_percent)})",
        f"rows not compared: {dropped or 'none'}",
        f"run of {shadow.run_rows} rows: {times[0]} ms served, {times[1]} ms shadow",
    ]


def _tables(outputs: Sequence[OutputStatus]) -> list[str]:
    floats = [each for each in outputs if each.kind == "float"]
    others = [each for each in outputs if each.kind != "float"]
    tables = []
    if floats:
        figures = ("difference", "p50", "p95", "p99", "highest", "bias", "unmatched")
        rows = [row for each in floats for row in _float_rows(each)]
        tables.append(render_table(("output", "differ", *figures), rows, numbers_from=3))
    if others:
        kinds = [(each.output, _percent(each.disagreeing_percent), each.kind) for each in others]
        tables.append(render_table(("output", "differ", "kind"), kinds))
    tables += [_pairs(each) for each in others if each.pairs]
    return [line for table in tables for line in (*table, "")][:-1]


def _float_rows(output: OutputStatus) -> list[Row]:
    absolute, relative = _differences(output.absolute), _differences(output.relative)
    first = (output.output, _percent(output.disagreeing_percent))
    last = (_number(output.bias), format_count(output.unmatched))
    return [(*first, "absolute", *absolute, *last), ("", "", "relative", *relative, "", "")]


def _differences(found: DifferenceStatus | None) -> Row:
    if found is None:
        return (UNKNOWN,) * 4
    return tuple(map(_number, (found.p50, found.p95, found.p99, found.highest)))


def _pairs(output: OutputStatus) -> list[str]:
    rows = [(pair, format_count(count)) for pair, count in output.pairs.items()]
    return render_table((f"{output.output}: served > shadow", "rows"), rows, numbers_from=1)


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g} %"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"
