"""Segments: seals, mappings, backing memory, and release with the last descriptor.

One process is both creator and receiver: it maps a duplicate of the descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iskander.errors import SegmentError
from iskander.interprocess.memory.backing import (
    HUGE_PAGE_BYTES,
    Backing,
    BackingOptions,
    huge_pages_free,
    huge_pages_needed,
    huge_pages_notice,
    lock_limit_bytes,
    mapped_node_bytes,
    node_notice,
    transparent_setting,
)
from iskander.interprocess.memory.segment import Segment

SHRINK, GROW, SEAL, FUTURE_WRITE = 0x02, 0x04, 0x01, 0x10
GET_SEALS, ADD_SEALS = 1034, 1033
PAGE = mmap.PAGESIZE


def open_fds() -> set[str]:
    # The listing includes its own descriptor, whose link no longer exists afterwards.
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")}


@pytest.fixture(autouse=True)
def _no_descriptor_leaks() -> Iterator[None]:
    """Check that each test closes all descriptors, also after a rejected attach."""
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def shared() -> Iterator[Segment]:
    segment = Segment.create("test", 2 * PAGE)
    yield segment
    segment.close()


@pytest.fixture
def read_only() -> Iterator[Segment]:
    segment = Segment.create("test", 2 * PAGE, is_read_only=True)
    yield segment
    segment.close()


def test_both_mappings_share_the_same_bytes(shared: Segment) -> None:
    other = Segment.attach(os.dup(shared.fd), 2 * PAGE, is_writable=True)

    shared.view[:5] = b"hello"
    other.view[PAGE : PAGE + 5] = b"world"

    assert bytes(other.view[:5]) == b"hello"
    assert bytes(shared.view[PAGE : PAGE + 5]) == b"world"
    assert shared.address != other.address
    other.close()


def test_address_is_that_of_the_view(shared: Segment) -> None:
    """ctypes must read at the address what the view wrote."""
    import ctypes

    shared.view[PAGE : PAGE + 4] = b"here"

    assert ctypes.string_at(shared.address + PAGE, 4) == b"here"


@pytest.mark.parametrize(
    ("requested", "expected"),
    [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (3 * PAGE - 1, 3 * PAGE)],
)
def test_segment_has_whole_zeroed_pages(requested: int, expected: int) -> None:
    segment = Segment.create("test", requested)

    assert len(segment) == len(segment.view) == os.fstat(segment.fd).st_size == expected
    assert bytes(segment.view) == bytes(expected)
    segment.close()


def test_length_is_sealed_permanently(shared: Segment) -> None:
    assert fcntl.fcntl(shared.fd, GET_SEALS) == SHRINK | GROW | SEAL
    with pytest.raises(PermissionError):
        fcntl.fcntl(shared.fd, ADD_SEALS, FUTURE_WRITE)


@pytest.mark.parametrize("length_bytes", [0, PAGE, 3 * PAGE])
def test_no_descriptor_can_change_the_length(shared: Segment, length_bytes: int) -> None:
    """Neither the creator's descriptor nor a receiver's can change the length."""
    other = os.dup(shared.fd)
    try:
        for fd in (shared.fd, other):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length_bytes)
    finally:
        os.close(other)

    assert os.fstat(shared.fd).st_size == 2 * PAGE


def test_read_only_segment_has_a_future_write_seal(read_only: Segment) -> None:
    assert fcntl.fcntl(read_only.fd, GET_SEALS) == SHRINK | GROW | SEAL | FUTURE_WRITE


def test_read_only_segment_is_writable_by_its_creator(read_only: Segment) -> None:
    other = Segment.attach(os.dup(read_only.fd), 2 * PAGE, is_writable=False)

    read_only.view[:5] = b"hello"

    assert bytes(other.view[:5]) == b"hello"
    other.close()


def test_read_only_segment_cannot_be_mapped_writable(read_only: Segment) -> None:
    with pytest.raises(SegmentError, match="cannot be mapped"):
        Segment.attach(os.dup(read_only.fd), 2 * PAGE, is_writable=True)


def test_read_only_segment_cannot_be_written_through_its_descriptor(read_only: Segment) -> None:
    """A worker has the descriptor, so the seal must hold without this program's code."""
    other = os.dup(read_only.fd)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(other, 2 * PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(other, b"x", 0)
        with pytest.raises(PermissionError):
            os.open(f"/proc/self/fd/{other}", os.O_WRONLY | os.O_TRUNC)
    finally:
        os.close(other)


def test_view_mapped_for_reading_is_read_only(shared: Segment) -> None:
    other = Segment.attach(os.dup(shared.fd), 2 * PAGE, is_writable=False)

    assert other.view.readonly
    with pytest.raises(TypeError):
        other.view[0] = 1
    other.close()


def new_unsealed_fd(length_bytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length_bytes)
    return fd


def fd_factory_with_seals(seals: int) -> Callable[[], int]:
    def open_fd() -> int:
        fd = new_unsealed_fd(PAGE)
        fcntl.fcntl(fd, ADD_SEALS, seals)
        return fd

    return open_fd


def ordinary_file() -> int:
    return os.open(__file__, os.O_RDONLY)


@pytest.mark.parametrize(
    "open_fd",
    [
        pytest.param(lambda: new_unsealed_fd(PAGE), id="no seals"),
        pytest.param(fd_factory_with_seals(GROW), id="can shrink"),
        pytest.param(fd_factory_with_seals(SHRINK), id="can grow"),
        pytest.param(ordinary_file, id="a file"),
    ],
)
def test_descriptor_without_length_seals_is_rejected(open_fd: Callable[[], int]) -> None:
    with pytest.raises(SegmentError):
        Segment.attach(open_fd(), PAGE, is_writable=False)


def test_descriptor_sealed_by_other_code_is_accepted() -> None:
    """A sealed length is sufficient, whoever sealed it."""
    segment = Segment.attach(fd_factory_with_seals(SHRINK | GROW)(), PAGE, is_writable=True)

    assert len(segment) == PAGE
    segment.close()


def test_segment_shorter_than_declared_is_rejected(shared: Segment) -> None:
    with pytest.raises(SegmentError, match=f"fewer than {2 * PAGE + 1} bytes"):
        Segment.attach(os.dup(shared.fd), 2 * PAGE + 1, is_writable=False)


def test_close_releases_the_mapping_and_the_descriptor() -> None:
    before = open_fds()
    segment = Segment.create("test", PAGE)
    fd, view = segment.fd, segment.view

    segment.close()

    assert open_fds() == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_remaining_view_keeps_the_mapping() -> None:
    segment = Segment.create("test", PAGE)
    part = segment.view[:5]
    segment.view[:5] = b"hello"

    segment.close()

    assert bytes(part) == b"hello"
    del segment, part
    assert "iskander:test" not in Path("/proc/self/maps").read_text()


def test_receiver_keeps_the_bytes_after_the_creator_closes() -> None:
    creator = Segment.create("test", PAGE)
    other = Segment.attach(os.dup(creator.fd), PAGE, is_writable=False)
    creator.view[:5] = b"after"

    creator.close()

    assert bytes(other.view[:5]) == b"after"
    other.close()


def test_segment_has_no_name_and_is_closed_by_exec() -> None:
    """Nothing in /dev/shm can leak, and exec closes the descriptor."""
    label = f"label-{os.getpid()}"
    segment = Segment.create(label, PAGE)

    assert not [name for name in os.listdir("/dev/shm") if label in name]
    assert os.readlink(f"/proc/self/fd/{segment.fd}") == f"/memfd:{label} (deleted)"
    assert not os.get_inheritable(segment.fd)
    segment.close()


def test_failed_allocation_is_a_segment_error() -> None:
    with pytest.raises(SegmentError, match="creating a segment of"):
        Segment.create("test", 1 << 62)


def test_repr_shows_the_state_in_one_line(shared: Segment) -> None:
    assert repr(shared) == f"<Segment fd={shared.fd} {2 * PAGE} bytes rw>"


def smaps(segment: Segment) -> dict[str, str]:
    """Return the smaps fields of a segment's mapping."""
    _, _, after = Path("/proc/self/smaps").read_text().partition(f"\n{segment.address:x}-")
    rows = (line.partition(":") for line in after.splitlines()[1:])
    fields: dict[str, str] = {}
    for name, _, value in rows:
        if name in fields:
            break
        fields[name] = value.strip()
    return fields


NO_HUGE_PAGES = pytest.mark.skipif(
    huge_pages_free() > 0 or transparent_setting() not in ("never", "deny"),
    reason="huge pages are available",
)
RESERVED_PAGES = pytest.mark.skipif(
    huge_pages_free() < 3, reason="needs `sysctl vm.nr_hugepages=3`"
)
TRANSPARENT_PAGES = pytest.mark.skipif(
    huge_pages_free() > 0 or transparent_setting() not in ("always", "within_size", "advise"),
    reason="needs `advise` in shmem_enabled, and no reserved pages",
)


def test_segment_is_plain_memory_by_default(shared: Segment) -> None:
    assert shared.backing == Backing(2 * PAGE)
    assert str(shared.backing) == "0.0078125 MiB"


@NO_HUGE_PAGES
def test_without_huge_pages_a_segment_has_small_pages_and_a_notice() -> None:
    segment = Segment.create("test", HUGE_PAGE_BYTES + 1, BackingOptions(is_huge=True))

    assert len(segment) == 2 * HUGE_PAGE_BYTES
    assert segment.backing.huge_bytes == 0
    (notice,) = segment.backing.notices
    assert notice == (
        "no reserved huge pages, Cannot allocate memory: 2 needed, 0 free "
        f"(vm.nr_hugepages); 0 MiB in transparent ones (shmem_enabled is {transparent_setting()})"
    )
    assert str(segment.backing) == "4 MiB"
    segment.view[-1] = 1
    segment.close()


@RESERVED_PAGES
def test_reserved_huge_pages_are_used_sealed_and_released() -> None:
    free = huge_pages_free()
    options = BackingOptions(is_huge=True, is_locked=True)
    segment = Segment.create("test", HUGE_PAGE_BYTES + 1, options, is_read_only=True)

    assert segment.backing == Backing(2 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES, is_locked=True)
    assert str(segment.backing) == "4 MiB, 4 in huge pages, locked"
    assert smaps(segment)["KernelPageSize"] == "2048 kB"
    assert huge_pages_free() == free - 2
    assert fcntl.fcntl(segment.fd, GET_SEALS) == SHRINK | GROW | SEAL | FUTURE_WRITE
    # The receiver requests the used bytes and maps whole pages.
    other = Segment.attach(os.dup(segment.fd), HUGE_PAGE_BYTES + 1, is_writable=False)
    assert len(other) == len(segment)
    segment.view[-1] = 7
    assert other.view[-1] == 7
    with pytest.raises(SegmentError, match="cannot be mapped"):
        Segment.attach(os.dup(segment.fd), len(segment), is_writable=True)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    other.close()
    segment.close()
    assert huge_pages_free() == free


@RESERVED_PAGES
def test_segment_larger_than_the_reserved_pages_has_only_small_pages() -> None:
    free = huge_pages_free()
    segment = Segment.create("test", (free + 1) * HUGE_PAGE_BYTES, BackingOptions(is_huge=True))

    assert segment.backing.huge_bytes == 0
    assert f"{free + 1} needed, {free} free" in segment.backing.notices[0]
    segment.close()
    assert huge_pages_free() == free


@TRANSPARENT_PAGES
def test_transparent_huge_pages_are_used_without_reserved_pages() -> None:
    segment = Segment.create("test", 2 * HUGE_PAGE_BYTES, BackingOptions(is_huge=True))

    mapped = smaps(segment)["ShmemPmdMapped"]
    assert mapped == f"{segment.backing.huge_bytes >> 10} kB"
    assert bool(segment.backing.notices) is (segment.backing.huge_bytes < len(segment))
    segment.close()


@pytest.mark.skipif(
    (lock_limit_bytes() or 4 * PAGE) < 4 * PAGE, reason="the memory lock limit is too low"
)
def test_locked_segment_is_locked() -> None:
    segment = Segment.create("test", 2 * PAGE, BackingOptions(is_locked=True))

    assert segment.backing == Backing(2 * PAGE, is_locked=True)
    assert segment.backing.locked_bytes == 2 * PAGE
    assert "lo" in smaps(segment)["VmFlags"].split()
    segment.close()


def test_mapped_node_bytes_lists_the_nodes_of_a_segment() -> None:
    segment = Segment.create("test", 3 * PAGE, BackingOptions(node=0))
    if segment.backing.node is None:
        segment.close()
        pytest.skip("no memory policy on this system")

    node_bytes = mapped_node_bytes(segment.address)

    assert sum(node_bytes.values()) == 3 * PAGE
    assert bool(node_notice(0, node_bytes)) is (set(node_bytes) != {0})
    assert mapped_node_bytes(segment.address + 1) == {}
    segment.close()


def test_node_notice_names_the_nodes_that_supplied_memory() -> None:
    assert node_notice(1, {1: HUGE_PAGE_BYTES}) == node_notice(1, {}) == ""
    assert node_notice(1, {2: PAGE, 1: PAGE, 0: HUGE_PAGE_BYTES}) == (
        "not enough memory of this kind on node 1: 2 MiB of node 0, 0.00390625 MiB of node 2 was "
        "used"
    )


def test_notice_for_efault_names_the_cgroup_limit() -> None:
    assert "their cgroup allows fewer: 1 needed" in huge_pages_notice(
        1, 0, OSError(errno.EFAULT, "Bad address")
    )
    assert "huge pages, no: 1 needed" in huge_pages_notice(1, 0, OSError(errno.ENOMEM, "no"))


def test_missing_node_leaves_the_segment_without_a_policy() -> None:
    segment = Segment.create("test", 2 * PAGE, BackingOptions(node=1000))

    assert segment.backing.node is None
    (notice,) = segment.backing.notices
    assert notice.startswith("no memory policy for node 1000: mbind was refused with E")
    segment.close()


@pytest.mark.parametrize(
    ("length_bytes", "pages"),
    [(0, 0), (1, 1), (HUGE_PAGE_BYTES, 1), (HUGE_PAGE_BYTES + 1, 2)],
)
def test_huge_pages_needed_rounds_up(length_bytes: int, pages: int) -> None:
    assert huge_pages_needed(length_bytes) == pages


def test_reserved_but_unused_pages_are_not_free(tmp_path: Path) -> None:
    pool = tmp_path / "kernel/mm/hugepages/hugepages-2048kB"
    pool.mkdir(parents=True)
    (pool / "free_hugepages").write_text("5\n")
    (pool / "resv_hugepages").write_text("2\n")

    assert huge_pages_free(tmp_path) == 3
    assert huge_pages_free(tmp_path / "none") == 0


def test_transparent_setting_is_the_value_in_brackets(tmp_path: Path) -> None:
    rule = tmp_path / "kernel/mm/transparent_hugepage/shmem_enabled"
    rule.parent.mkdir(parents=True)
    rule.write_text("always within_size [advise] never deny force\n")

    assert transparent_setting(tmp_path) == "advise"
    assert transparent_setting(tmp_path / "none") == "not there"
