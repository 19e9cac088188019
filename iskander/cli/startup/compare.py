"""`iskander models compare`: results of the shadow versions of a model beside those served.

Reads the status document at `admin.address`, in which all processes of a gateway are merged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from iskander.cli import command
from iskander.cli.command import print_lines
from iskander.cli.tables import Row, format_count, printable, render_table
from iskander.errors import ConnectionFailed, ModelNotFound
from iskander.foundation.exit_codes import ExitCode

if TYPE_CHECKING:
    from iskander.cli.command import Commands

ADMIN = "127.0.0.1:50052"
"""Default of `admin.address`."""
ANSWER_S = 10.0
PAGE_BYTES_MAX = 64 << 20
UNKNOWN = "-"

Entry = Mapping[str, Any]


def add_command(commands: Commands) -> None:
    """Add the command."""
    sentence = "compare the results of a model's shadow versions with those of the served ones"
    parser = command.add_command(commands, "compare", run, sentence, command.add_name)
    sentence = "`admin.address` of the server, or https://HOST:PORT (default: %(default)s)"
    parser.add_argument("--admin", default=ADMIN, metavar="HOST:PORT", help=sentence)
    command.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    status = _read(arguments.admin)
    found = {
        key: [entry for entry in status.get(key, ()) if entry["name"] == arguments.model]
        for key in ("shadows", "shadow_outputs")
    }
    if not found["shadows"]:
        text = f"model `{arguments.model}` has no shadow version on this server"
        raise ModelNotFound(text, model=arguments.model)
    if arguments.json:
        command.print_json(found)
    else:
        print_lines(*render(found["shadows"], found["shadow_outputs"]))
    return ExitCode.DONE


def render(shadows: Sequence[Entry], outputs: Sequence[Entry]) -> list[str]:
    """Return the figures as tables."""
    lines: list[str] = []
    for shadow in shadows:
        own = [each for each in outputs if _key(each) == _key(shadow)]
        lines += [*_summary(shadow), "", *_tables(own), ""]
    return lines[:-1]


def _read(address: str) -> Any:  # noqa: ANN401
    """Return the status document of a server."""
    from http.client import HTTPException
    from urllib.error import URLError
    from urllib.request import ProxyHandler, build_opener

    url = f"{address if '://' in address else f'http://{address}'}/status.json"
    opener = build_opener(ProxyHandler({}))  # Proxies cannot reach ports of this machine.
    try:
        with opener.open(url, timeout=ANSWER_S) as response:
            return json.loads(response.read(PAGE_BYTES_MAX))
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise ConnectionFailed(
            f"no status at {url}: {reason}; it needs `admin.address`, `admin.page` and the extra "
            "`http`"
        ) from None


def _key(entry: Entry) -> tuple[str, str, str]:
    return entry["name"], entry["served"], entry["candidate"]


def _summary(shadow: Entry) -> list[str]:
    name, served, candidate = _key(shadow)
    reason = f": {printable(shadow['reason'])}" if shadow["reason"] else ""
    dropped = ", ".join(f"{key} {format_count(n)}" for key, n in sorted(shadow["dropped"].items()))
    times = (_number(shadow["served_run_ms"]), _number(shadow["candidate_run_ms"]))
    return [
        f"{name}: served version {served}, shadow version {candidate}, share {shadow['share']:g}",
        f"{shadow['state']}{reason}",
        f"{format_count(shadow['rows'])} rows compared, {format_count(shadow['disagreeing'])} "
        f"differ ({_percent(shadow['disagreeing_percent'])})",
        f"rows not compared: {dropped or 'none'}",
        f"run of {shadow['run_rows']} rows: {times[0]} ms served, {times[1]} ms shadow",
    ]


def _tables(outputs: Sequence[Entry]) -> list[str]:
    floats = [each for each in outputs if each["kind"] == "float"]
    others = [each for each in outputs if each["kind"] != "float"]
    tables = []
    if floats:
        figures = ("difference", "p50", "p95", "p99", "highest", "bias", "unmatched")
        rows = [row for each in floats for row in _float_rows(each)]
        tables.append(render_table(("output", "differ", *figures), rows, numbers_from=3))
    if others:
        kinds = [(each["output"], _percent(each["disagreeing_percent"]), each["kind"])
                 for each in others]  # fmt: skip
        tables.append(render_table(("output", "differ", "kind"), kinds))
    tables += [_pairs(each) for each in others if each["pairs"]]
    return [line for table in tables for line in (*table, "")][:-1]


def _float_rows(output: Entry) -> list[Row]:
    absolute, relative = (
        (kind, *(_number(output[kind][key]) for key in ("p50", "p95", "p99", "highest")))
        for kind in ("absolute", "relative")
    )
    first = (output["output"], _percent(output["disagreeing_percent"]))
    last = (_number(output["bias"]), format_count(output["unmatched"]))
    return [(*first, *absolute, *last), ("", "", *relative, "", "")]


def _pairs(output: Entry) -> list[str]:
    rows = [(pair, format_count(count)) for pair, count in output["pairs"].items()]
    return render_table((f"{output['output']}: served > shadow", "rows"), rows, numbers_from=1)


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g} %"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"
