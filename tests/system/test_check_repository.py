"""`iskander check` with a repository: each version that a start would load, and why not."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.processes import BIN
from support.repositories import Folder


def check(config: Path) -> tuple[int, dict[str, str]]:
    """The exit code, and what stands behind each name in the first column."""
    done = subprocess.run(
        [BIN / "iskander", "check", config], capture_output=True, text=True, check=False
    )
    table = done.stdout.split("\n\n")[0].splitlines()[1:]
    told = {line.split()[0]: line.split(maxsplit=3)[3] for line in table if line[0] != " "}
    return done.returncode, told


def configuration(folder: Path, settings: str = "") -> Path:
    path = folder / "iskander.toml"
    path.write_text(f'[server]\naddress = "127.0.0.1:0"\n[repository]\npath = "models"\n{settings}')
    return path


def test_the_versions_that_a_start_would_load_are_loaded(tmp_path: Path) -> None:
    models = Folder(tmp_path / "models")
    models.put("one", 1, 2)
    models.put("one", 3, 4)
    models.put("all", 1, 2)
    models.put("all", 2, 3)
    models.say("all", 'versions = "all"\n')

    code, told = check(configuration(tmp_path))

    assert (code, sorted(told)) == (0, ["all/1", "all/2", "one/3"])
    assert told["one/3"] == "x int64"


def test_what_does_not_load_is_told_beside_what_does(tmp_path: Path) -> None:
    models = Folder(tmp_path / "models")
    models.put("good", 1, 2)
    models.put("bad", 1, 2)
    (tmp_path / "models" / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    models.put("torn", 1, 2)
    models.say("torn", "versions = [\n")

    code, told = check(configuration(tmp_path))

    assert code == 1
    assert told["good/1"] == "x int64"
    assert told["bad/1"].startswith("cannot be loaded: ") and "model.onnx" in told["bad/1"]
    assert told["torn"].startswith("cannot be loaded: ") and "model.toml" in told["torn"]


def test_what_a_start_would_not_be_ready_with_is_told(tmp_path: Path) -> None:
    models = Folder(tmp_path / "models")
    models.put("absent", 1, 2)
    models.say("absent", "versions = [7]\n")
    models.put("astray", 1, 2)
    models.say("astray", "aliases = {canary = 9}\n")

    code, told = check(configuration(tmp_path))

    assert code == 1
    assert "version policy selects no version" in told["absent"]
    assert "the routing refers to missing versions: 9" in told["astray"]
    assert told["astray/1"] == "x int64"


def test_with_explicit_control_only_what_is_named_is_loaded(tmp_path: Path) -> None:
    models = Folder(tmp_path / "models")
    models.put("named", 1, 2)
    models.put("other", 1, 2)
    settings = 'control = "explicit"\nload = ["named", "absent"]\n'

    code, told = check(configuration(tmp_path, settings))

    assert code == 1
    assert told == {
        "absent": "cannot be loaded: no such folder in the repository",
        "named/1": "x int64",
    }
