"""A terminal of 80 columns for a command: its keys, and the text on its screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from support.processes import STOP_WITHIN_S, eventually

READ_BYTES = 65_536


class Terminal:
    """A command in a pseudo terminal; `process` is the command."""

    def __init__(self, command: Sequence[str], columns: int, lines: int) -> None:
        pyte = pytest.importorskip("pyte")
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.received = b""
        self._fd, end = pty.openpty()
        self._set_size(columns, lines)
        self.mode = termios.tcgetattr(end)
        self._end = end
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True
        )

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def lines(self) -> list[str]:
        """The text on the screen now."""
        while select.select([self._fd], [], [], 0)[0]:
            try:
                data = os.read(self._fd, READ_BYTES)
            except OSError:
                break
            self.received += data
            self._stream.feed(data)
        return [line.rstrip() for line in self._screen.display]

    def wait_for(self, text: str) -> list[str]:
        """Wait until a text is on the screen; return the lines."""
        found: list[str] = eventually(
            lambda: any(text in line for line in self.lines()) and self.lines(),
            what=f"`{text}` on the screen",
        )
        return found

    def wait(self) -> int:
        """Wait for the end of the command; return its exit code."""
        eventually(lambda: (self.lines(), self.process.poll() is not None)[1], what="the end")
        self.lines()
        return self.process.wait()

    def current_mode(self) -> list[Any]:
        return termios.tcgetattr(self._end)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(STOP_WITHIN_S)
        os.close(self._fd)
        os.close(self._end)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextlib.contextmanager
def terminal(command: Sequence[str], columns: int = 80, lines: int = 24) -> Iterator[Terminal]:
    """Run a command in a terminal, and end it."""
    opened = Terminal(command, columns, lines)
    try:
        yield opened
    finally:
        opened.close()
