"""`iskander check` with a repository: versions loaded at start, and their errors."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.processes import BIN
from support.repositories import Folder


def check(config: Path) -> tuple[int, dict[str, str]]:
    """Returns the exit code, and the rest of each row by the name in its first column."""
    done = subprocess.run(
        [BIN / "iskander", "check", config], capture_output=True, text=True, check=False
    )
    table = done.stdout.split("\n\n")[0].splitlines()[1:]
    rows = {line.split()[0]: line.split(maxsplit=3)[3] for line in table if line[0] != " "}
    return done.returncode, rows


def configuration(folder: Path, settings: str = "") -> Path:
    path = folder / "iskander.toml"
    path.write_text(f'[server]\naddress = "127.0.0.1:0"\n[repository]\npath = "models"\n{settings}')
    return path


def test_versions_selected_at_start_are_loaded(tmp_path: Path) -> None:
    models = Folder(tmp_path / "models")
    models.put("one", 1, 2)
    models.put("one", 3, 4)
    models.put("all", 1, 2)
    models.put("all", 2, 3)
    models.write_settings("all", 'versions = "all"\n')

    code, rows = check(configuration(tmp_path))

    assert (code, sorted(rows)) == (0, ["all/1", "all/2", "one/3"])
    assert rows["one/3"] == "x int64"


def test_load_errors_are_listed_with_loaded_versions(tmp_path: Path) -> None:
    models = Folder(tmp_path / "models")
    models.put("good", 1, 2)
    models.put("bad", 1, 2)
    (tmp_path / "models" / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    models.put("torn", 1, 2)
    models.write_settings("torn", "versions = [\n")

    code, rows = check(configuration(tmp_path))

    assert code == 1
    assert rows["good/1"] == "x int64"
    assert rows["bad/1"].startswith("cannot be loaded: ") and "model.onnx" in rows["bad/1"]
    assert rows["torn"].startswith("cannot be loaded: ") and "model.toml" in rows["torn"]


def test_every_bad_model_of_a_configuration_is_named(tmp_path: Path) -> None:
    """The first error does not hide the second one; the exit code is that of the gateway."""
    models = Folder(tmp_path / "models")
    for name in ("bad", "good", "worse"):
        models.put(name, 1, 2)
    for name in ("bad", "worse"):
        (tmp_path / "models" / name / "1" / "model.onnx").write_bytes(b"no model")
    entries = "".join(
        f'[[models]]\nname = "{name}"\npath = "models/{name}/1"\n'
        for name in ("bad", "good", "worse")
    )
    config = tmp_path / "iskander.toml"
    config.write_text(f'[server]\naddress = "127.0.0.1:0"\n{entries}')
    done = subprocess.run(
        [BIN / "iskander", "check", config], capture_output=True, text=True, check=False
    )
    assert done.returncode == 78
    assert "model `bad/1`: " in done.stderr and "model `worse/1`: " in done.stderr
    assert "good/1" not in done.stderr


def test_settings_that_prevent_readiness_are_listed(tmp_path: Path) -> None:
    models = Folder(tmp_path / "models")
    models.put("absent", 1, 2)
    models.write_settings("absent", "versions = [7]\n")
    models.put("astray", 1, 2)
    models.write_settings("astray", "aliases = {canary = 9}\n")

    code, rows = check(configuration(tmp_path))

    assert code == 1
    assert "version policy selects no version" in rows["absent"]
    assert "the routing refers to missing versions: 9" in rows["astray"]
    assert rows["astray/1"] == "x int64"


def test_explicit_control_loads_only_the_named_models(tmp_path: Path) -> None:
    models = Folder(tmp_path / "models")
    models.put("named", 1, 2)
    models.put("other", 1, 2)
    settings = 'control = "explicit"\nload = ["named", "absent"]\n'

    code, rows = check(configuration(tmp_path, settings))

    assert code == 1
    assert rows == {
        "absent": "cannot be loaded: no such folder in the repository",
        "named/1": "x int64",
    }
