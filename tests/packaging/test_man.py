"""Man pages: free of warnings, with all commands and exit codes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import ROOT

from iskander.foundation.exit_codes import MEANINGS


@pytest.fixture
def pages(tmp_path: Path) -> dict[str, Path]:
    pytest.importorskip("argparse_manpage", reason="pip install '.[deb]'")
    build = [sys.executable, str(ROOT / "scripts" / "build_man.py"), str(tmp_path)]
    subprocess.run(build, check=True, timeout=60)
    return {path.stem: path for path in tmp_path.glob("*.1")}


def test_pages_have_the_exit_codes_of_their_command(pages: dict[str, Path]) -> None:
    assert pages.keys() == MEANINGS.keys()
    for name, path in pages.items():
        _, _, status = path.read_text().partition(".SH EXIT STATUS\n")
        assert status.count(".TP\n.B ") == len(MEANINGS[name])
    # Of a subcommand.
    assert "install\\-systemd" in pages["iskander"].read_text()


@pytest.mark.parametrize(
    ("command", "package"),
    [
        (["man", "--warnings", "--encoding=utf8", "-l"], "man-db"),
        (["mandoc", "-Tlint", "-W", "warning"], "mandoc"),
    ],
)
def test_pages_have_no_warning(pages: dict[str, Path], command: list[str], package: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"`{command[0]}` is missing: apt-get install {package}")
    for path in pages.values():
        done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
        # `mandoc` prints its warnings to standard output, `man` prints the page there.
        assert done.stderr == "" and (package == "man-db" or done.stdout == "")
