"""Arguments of commands that are no UTF-8 text."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from iskander.cli.main import main

NOT_UTF8 = os.fsdecode(b"a\xff")


def run(*arguments: str) -> int | str | None:
    """Runs a command; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["iskander", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["load", NOT_UTF8], "model"),
        (["token", NOT_UTF8, "--file", "t.toml"], "name"),
        (["token", "t", "--file", "t.toml", "--model", NOT_UTF8], "model"),
        (["score", "m", NOT_UTF8, "-o", "out"], "inputs"),
        (["score", "m", "a.parquet", "-o", NOT_UTF8], "output"),
        (["score", "m", "a.parquet", "-o", "out", "--filter", f"a > '{NOT_UTF8}'"], "filter"),
        (["check", "a.toml", "--set", f"admin.address={NOT_UTF8}"], "set"),
    ],
)
def test_argument_that_is_not_utf8_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"iskander: argument `{name}`: `")
    assert r"a\xff" in text and "is not UTF-8" in text
    assert not list(tmp_path.iterdir())


def test_file_whose_name_is_not_utf8_is_an_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python opens files with any name."""
    (tmp_path / NOT_UTF8).write_text("[admin]\nadress = 1\n")
    assert run("check", str(tmp_path / NOT_UTF8)) == 78
    assert "adress" in capsys.readouterr().err
