"""Names of models, and folders of private servers."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from iskander.errors import NotReady
from iskander.lake.run import server


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("churn.onnx", "churn"),
        ("churn/model.onnx", "churn"),
        ("churn/3/model.onnx", "churn"),
        ("churn/3", "churn"),
        ("my model!.onnx", "my-model-"),
        ("_x.onnx", "model_x"),
    ],
)
def test_name_of_a_model_comes_from_its_path(tmp_path: Path, path: str, name: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix:
        file.touch()
    else:
        file.mkdir()
    assert server.model_name(str(file)) == name


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("1/model.onnx", "10/model.onnx", "9/model.onnx"), "10"),
        (("1/model.onnx", "2/model.onnx.part", "02/model.onnx", "x/model.onnx"), "1"),
        (("3/manifest.toml", "2/model.onnx"), "3"),
        (("model.onnx", "2/model.onnx"), ""),
        (("notes.txt",), ""),
    ],
)
def test_newest_version_of_a_folder_is_served(
    tmp_path: Path, files: tuple[str, ...], expected: str
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert server.model_path(str(tmp_path)) == tmp_path / expected


def test_folders_of_dead_commands_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.tempfile, "gettempdir", lambda: str(tmp_path))
    alive, dead, new = (tmp_path / f"{server.FOLDER}{name}" for name in ("alive", "dead", "new"))
    for each in (alive, dead, new):
        each.mkdir()
    (dead / server.LOCK).touch()
    with (alive / server.LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with server._locked_folder() as folder:
            assert set(tmp_path.iterdir()) == {alive, new, folder}
            # Another command does not delete this one's.
            with server._locked_folder():
                assert folder.exists()
    assert set(tmp_path.iterdir()) == {alive, new}


def test_gateway_that_the_system_cannot_start_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: Any, **options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(server.subprocess, "Popen", reject)
    monkeypatch.setattr(server, "READY_S", 5.0)
    private = server.PrivateServer({}, tmp_path / "iskander.toml", tmp_path)
    with pytest.raises(NotReady, match=r"cannot be started: .*temporarily unavailable"):
        private.start()
    private.stop()
