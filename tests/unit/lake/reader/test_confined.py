"""Filesystem of a source: its files, and no way out of its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from iskander.errors import SourceError
from iskander.lake.reader.confined import ConfinedFileSystem, filesystem_of
from iskander.lake.sources.places import Place, Stamp, expand, open_file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with files and links, beside a secret."""
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (root / "a.csv").write_text("a")
    (root / "in" / "b.csv").write_text("bb")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "s.csv").write_text("secret")
    (tmp_path / "root-2").mkdir()
    (tmp_path / "root-2" / "s.csv").write_text("secret")
    return root


def paths(root: Path, path: str) -> list[str]:
    files, _ = filesystem_of("src", str(root))
    return [info.path for info in expand(Place(files, path, path))[0]]


def test_folder_and_globs_are_listed_below_the_name_of_the_source(root: Path) -> None:
    assert paths(root, "src") == ["src/a.csv", "src/in/b.csv"]
    assert paths(root, "src/in") == ["src/in/b.csv"]
    assert paths(root, "src/*/*.csv") == ["src/in/b.csv"]
    assert paths(root, "src/**") == ["src/a.csv", "src/in/b.csv"]
    assert paths(root, "src/a.csv") == ["src/a.csv"]


def test_file_has_the_state_that_the_system_reports(root: Path) -> None:
    files, _ = filesystem_of("src", str(root))
    status = (root / "in" / "b.csv").stat()
    file, stamp = open_file(files, "src/in/b.csv")
    assert file.read() == b"bb"
    assert stamp == Stamp(status.st_size, status.st_mtime_ns, None)


def test_source_of_one_file_has_its_folder_as_root(root: Path) -> None:
    files, path = filesystem_of("src", str(root / "a.csv"))
    assert path == "src/a.csv"
    assert open_file(files, path)[0].read() == b"a"


@pytest.mark.parametrize("target", ["../secret/s.csv", "../root-2/s.csv", "/etc/passwd"])
def test_link_out_of_the_folder_is_rejected(root: Path, target: str) -> None:
    (root / "link.csv").symlink_to(target)
    files, _ = filesystem_of("src", str(root))
    with pytest.raises(SourceError, match="leaves the folder"):
        files.open_input_file("src/link.csv")
    with pytest.raises(SourceError, match="leaves the folder"):
        paths(root, "src")


def test_linked_folder_out_of_the_folder_is_rejected(root: Path) -> None:
    (root / "linked").symlink_to("../secret")
    files, _ = filesystem_of("src", str(root))
    for path in ("src/linked/s.csv", "src/in/../../secret/s.csv"):
        with pytest.raises(SourceError, match="leaves the folder"):
            files.open_input_file(path)
    with pytest.raises(SourceError, match="leaves the folder"):
        paths(root, "src/linked")


def test_link_inside_of_the_folder_is_followed(root: Path) -> None:
    (root / "link.csv").symlink_to("in/b.csv")
    files, _ = filesystem_of("src", str(root))
    assert files.open_input_file("src/link.csv").read() == b"bb"


def test_folder_that_becomes_a_link_is_rejected_when_its_file_is_opened(root: Path) -> None:
    files, _ = filesystem_of("src", str(root))
    assert open_file(files, "src/in/b.csv")[0].read() == b"bb"
    (root / "in").rename(root / "old")
    (root / "in").symlink_to("../secret")
    with pytest.raises(SourceError, match="leaves the folder"):
        open_file(files, "src/in/s.csv")


def test_loop_of_links_is_an_error(root: Path) -> None:
    (root / "in" / "loop").symlink_to("..")
    with pytest.raises(SourceError):
        paths(root, "src")


def test_pipe_is_no_file(root: Path) -> None:
    os.mkfifo(root / "pipe.csv")
    files, _ = filesystem_of("src", str(root))
    assert files.get_file_info("src/pipe.csv").type == pafs.FileType.Unknown
    with pytest.raises(SourceError, match="not a regular file"):
        files.open_input_file("src/pipe.csv")


def test_messages_have_no_absolute_path(root: Path, tmp_path: Path) -> None:
    files, _ = filesystem_of("src", str(root))
    with pytest.raises(SourceError) as caught:
        open_file(files, "src/none.csv")
    assert str(tmp_path) not in caught.value.message and "src/none.csv" in caught.value.message
    with pytest.raises(SourceError) as caught:
        filesystem_of("src", str(tmp_path / "none"))
    assert str(tmp_path) not in caught.value.message


def test_root_that_is_a_link_is_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(root)
    assert paths(tmp_path / "latest", "src/a.csv") == ["src/a.csv"]


def test_descriptors_are_closed(root: Path) -> None:
    files, _ = filesystem_of("src", str(root))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        files.open_input_file("src/a.csv").close()
        assert isinstance(files, ConfinedFileSystem)
        files.get_file_info(pafs.FileSelector("src", recursive=True))
    assert len(os.listdir("/proc/self/fd")) == before
