"""Unix socket paths: existing files, and removal at release."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from iskander.config.schema import ServerConfig
from iskander.errors import ConfigError
from iskander.gateway.transport.sockets import BoundPath


def test_existing_file_is_not_replaced(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("dear")
    with pytest.raises(ConfigError, match=r"notes\.txt: path exists and is not a socket"):
        BoundPath(notes, ServerConfig())
    assert notes.read_text() == "dear"
    assert list(tmp_path.iterdir()) == [notes]


def test_existing_link_is_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a socket"):
        BoundPath(link, ServerConfig())
    assert link.is_symlink()


def test_socket_of_an_exited_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    bound = BoundPath(path, ServerConfig())
    bound.socket.close()
    assert path.is_socket()
    with pytest.raises(ConfigError, match="another process listens"):
        BoundPath(path, ServerConfig())
    bound.release()
    assert not path.exists()


def test_release_keeps_a_file_that_replaced_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    bound = BoundPath(path, ServerConfig())
    bound.socket.close()
    path.unlink()
    path.write_text("dear")
    bound.release()
    assert path.read_text() == "dear"
