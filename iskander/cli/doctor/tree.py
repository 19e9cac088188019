"""Small files of /proc and /sys below a root; a missing or unreadable file is empty."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FILE_BYTES_MAX = 1 << 20


class Tree(NamedTuple):
    """Files below a root; paths are relative to it."""

    root: Path

    def text(self, path: str) -> str:
        """Content of a file, stripped; empty if it cannot be read."""
        try:
            with (self.root / path).open("rb") as file:
                return file.read(FILE_BYTES_MAX).decode(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """Integer in a file; None for any other content, such as `max`."""
        try:
            return int(self.text(path))
        except ValueError:
            return None

    def fields(self, path: str) -> dict[str, str]:
        """Values of a file with a line `NAME: VALUE` or `NAME VALUE` for each."""
        pairs = (line.replace(":", " ", 1).split(maxsplit=1) for line in self.lines(path))
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def lines(self, path: str) -> list[str]:
        return self.text(path).splitlines()

    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty if there is none."""
        try:
            return sorted(each.name for each in (self.root / path).iterdir())
        except OSError:
            return []
