"""Reference clients: scenarios in their own process, controlled by JSON lines.

A reference client is a script that ends with `serve(...)`. It reads one JSON line for each scenario
on standard input, `{"scenario": "...", ...}`, and responds with `{"facts": ...}` or
`{"error": traceback}`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

Facts: TypeAlias = Any
TIMEOUT_S = 20.0


class ReferenceClient:
    """The reference's process, from the test's view.

    Args:
        script: Of the reference.
        python: Its interpreter.
    """

    def __init__(self, script: str, python: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, scenario: str, **arguments: Any) -> None:
        """Start a scenario without waiting for it."""
        self.send({"scenario": scenario, **arguments})

    def send(self, line: Any) -> None:
        """Send a line to the running scenario."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def result(self) -> Facts:
        """The result of the running scenario."""
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["facts"]

    def run(self, scenario: str, **arguments: Any) -> Facts:
        self.begin(scenario, **arguments)
        return self.result()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
        self._process.stdout.close()


def send(answer: dict[str, Any]) -> None:
    """Write a line to the test, also during a scenario."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve(*scenarios: Callable[..., Facts]) -> None:
    """Run scenarios by name, until the end of the input; then exit.

    Without cleanup: during a regular exit grpcio can wait for the lock of a thread that has ended.
    """
    by_name = {scenario.__name__: scenario for scenario in scenarios}
    for line in sys.stdin:
        wanted = json.loads(line)
        try:
            send({"facts": by_name[wanted.pop("scenario")](**wanted)})
        except Exception:
            send({"error": traceback.format_exc()})
    os._exit(0)
