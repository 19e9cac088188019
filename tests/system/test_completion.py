"""Shell completions in the shells themselves: commands, options, choices and files."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import BIN

BASH = """
source iskander.bash
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_shtab_iskander
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
# The function reports the completed words instead of the command.
ZSH = """PROMPT=''; RPROMPT=''; unsetopt zle_bracketed_paste 2>/dev/null; unset zle_bracketed_paste
fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; zstyle ':completion:*' menu no
iskander() { print -r -- "[run:$*]" }
print -r -- "[rea""dy]"
"""
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the completions and a file."""
    path = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run(
            [BIN / "iskander", "completion", shell],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        # The name that compinit expects.
        (path / ("_iskander" if shell == "zsh" else f"iskander.{shell}")).write_text(done.stdout)
    (path / "settings.toml").write_text("")
    return path


def in_bash(folder: Path, words: str) -> list[str]:
    command = words.split(" ")
    quoted = " ".join(f'"{word}"' for word in command)
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH.format(words=quoted)],
        cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    return done.stdout.split()


def in_fish(folder: Path, words: str) -> list[str]:
    script = f"source iskander.fish; complete -C '{words}'"
    environment = os.environ | {"HOME": str(folder)}
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


def in_zsh(folder: Path, words: str, added: str) -> list[str]:
    """Type words and a tab in an interactive shell, which adds a text; return the words."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ["HOME"] = os.environ["ZDOTDIR"] = str(folder)
        os.environ["TERM"] = "dumb"
        os.execvp("zsh", ["zsh", "-f", "-i"])
    try:
        os.write(terminal, ZSH.encode())
        _read_until(terminal, "[ready]")
        os.write(terminal, f"{words}\t".encode())
        _read_until(terminal, added)
        os.write(terminal, b"\n")
        text = _read_until(terminal, "[run:", "]")
        return text.rpartition("[run:")[2].partition("]")[0].split()
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def _read_until(terminal: int, *words: str) -> str:
    text, deadline = "", time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 4096).decode(errors="replace")
        rest = text
        for word in words:
            _, found, rest = rest.partition(word)
            if not found:
                break
        else:
            return text
    raise AssertionError(f"no {words} within {TIMEOUT_S:g} s: {text}")


@pytest.mark.parametrize("shell", [in_bash, in_fish], ids=["bash", "fish"])
def test_candidates(folder: Path, shell: Callable[[Path, str], list[str]]) -> None:
    name = shell.__name__.removeprefix("in_")
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    assert {"check", "doctor", "drain", "bench", "score"} <= set(shell(folder, "iskander "))
    assert shell(folder, "iskander dra") == ["drain"]
    assert shell(folder, "iskander drain --timeo") == ["--timeout-s"]
    assert set(shell(folder, "iskander config ")) == {"show", "reference", "import-inferential"}
    assert shell(folder, "iskander completion z") == ["zsh"]
    assert shell(folder, "iskander check se") == ["settings.toml"]
    assert shell(folder, "iskander bench m --data se") == ["settings.toml"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("iskander dra", ["drain"]),
        ("iskander drain --timeo", ["drain", "--timeout-s"]),
        ("iskander config sh", ["config", "show"]),
        ("iskander check se", ["check", "settings.toml"]),
        ("iskander bench m --data se", ["bench", "m", "--data", "settings.toml"]),
    ],
)
def test_completed_words_of_zsh(folder: Path, typed: str, completed: list[str]) -> None:
    added = completed[-1].removeprefix(typed.rpartition(" ")[2])
    assert in_zsh(folder, typed, added) == completed
