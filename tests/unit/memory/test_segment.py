"""Segments: sealed against their makers and holders, and gone with the last descriptor.

Creator and receiver are one process here: a duplicated descriptor is mapped again.
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
from iskander.memory.backing import (
    HUGE_PAGE_BYTES,
    Backing,
    BackingOptions,
    huge_pages_free,
    huge_pages_needed,
    huge_pages_notice,
    lock_limit_bytes,
    mapped_node_bytes,
    node_notice,
    transparent_rule,
)
from iskander.memory.segment import Segment

SHRINK, GROW, SEAL, FUTURE_WRITE = 0x02, 0x04, 0x01, 0x10
GET_SEALS, ADD_SEALS = 1034, 1033
PAGE = mmap.PAGESIZE


def open_fds() -> set[str]:
    # The listing's own descriptor is in the listing; its link is gone afterwards.
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")}


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    """Every test here gives back all descriptors; also those whose attach was refused."""
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


def test_both_sides_see_the_same_bytes(shared: Segment) -> None:
    other = Segment.attach(os.dup(shared.fd), 2 * PAGE, is_writable=True)

    shared.view[:5] = b"hello"
    other.view[PAGE : PAGE + 5] = b"world"

    assert bytes(other.view[:5]) == b"hello"
    assert bytes(shared.view[PAGE : PAGE + 5]) == b"world"
    assert shared.address != other.address
    other.close()


def test_the_address_is_that_of_the_view(shared: Segment) -> None:
    """Given what ctypes reads at the address, which must be what was written through the view."""
    import ctypes

    shared.view[PAGE : PAGE + 4] = b"here"

    assert ctypes.string_at(shared.address + PAGE, 4) == b"here"


@pytest.mark.parametrize(
    ("wanted", "got"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (3 * PAGE - 1, 3 * PAGE)]
)
def test_a_segment_is_whole_pages_of_zeros(wanted: int, got: int) -> None:
    segment = Segment.create("test", wanted)

    assert len(segment) == len(segment.view) == os.fstat(segment.fd).st_size == got
    assert bytes(segment.view) == bytes(got)
    segment.close()


def test_length_is_sealed_for_good(shared: Segment) -> None:
    assert fcntl.fcntl(shared.fd, GET_SEALS) == SHRINK | GROW | SEAL
    with pytest.raises(PermissionError):
        fcntl.fcntl(shared.fd, ADD_SEALS, FUTURE_WRITE)


@pytest.mark.parametrize("length_bytes", [0, PAGE, 3 * PAGE])
def test_no_holder_can_change_the_length(shared: Segment, length_bytes: int) -> None:
    """Through the creator's descriptor and through the one that was handed over."""
    other = os.dup(shared.fd)
    try:
        for fd in (shared.fd, other):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length_bytes)
    finally:
        os.close(other)

    assert os.fstat(shared.fd).st_size == 2 * PAGE


def test_a_read_only_segment_is_sealed_against_writers_to_come(read_only: Segment) -> None:
    assert fcntl.fcntl(read_only.fd, GET_SEALS) == SHRINK | GROW | SEAL | FUTURE_WRITE


def test_a_read_only_segment_stays_writable_for_its_maker(read_only: Segment) -> None:
    other = Segment.attach(os.dup(read_only.fd), 2 * PAGE, is_writable=False)

    read_only.view[:5] = b"hello"

    assert bytes(other.view[:5]) == b"hello"
    other.close()


def test_a_read_only_segment_cannot_be_mapped_writable(read_only: Segment) -> None:
    with pytest.raises(SegmentError, match="cannot be mapped"):
        Segment.attach(os.dup(read_only.fd), 2 * PAGE, is_writable=True)


def test_a_read_only_segment_cannot_be_written_by_any_other_way(read_only: Segment) -> None:
    """A worker has the descriptor itself, so the seal has to hold without our code."""
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


def test_a_view_that_was_mapped_for_reading_is_read_only(shared: Segment) -> None:
    other = Segment.attach(os.dup(shared.fd), 2 * PAGE, is_writable=False)

    assert other.view.readonly
    with pytest.raises(TypeError):
        other.view[0] = 1
    other.close()


def unsealed(length_bytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length_bytes)
    return fd


def sealed_against(seals: int) -> Callable[[], int]:
    def make() -> int:
        fd = unsealed(PAGE)
        fcntl.fcntl(fd, ADD_SEALS, seals)
        return fd

    return make


def ordinary_file() -> int:
    return os.open(__file__, os.O_RDONLY)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: unsealed(PAGE), id="no seals"),
        pytest.param(sealed_against(GROW), id="may shrink"),
        pytest.param(sealed_against(SHRINK), id="may grow"),
        pytest.param(ordinary_file, id="a file"),
    ],
)
def test_what_its_maker_could_take_away_is_refused(make: Callable[[], int]) -> None:
    with pytest.raises(SegmentError):
        Segment.attach(make(), PAGE, is_writable=False)


def test_a_descriptor_sealed_by_somebody_else_is_taken() -> None:
    """The accepted case beside the refused ones: length sealed, whoever did it."""
    segment = Segment.attach(sealed_against(SHRINK | GROW)(), PAGE, is_writable=True)

    assert len(segment) == PAGE
    segment.close()


def test_a_segment_shorter_than_was_said_is_refused(shared: Segment) -> None:
    with pytest.raises(SegmentError, match=f"fewer than {2 * PAGE + 1} bytes"):
        Segment.attach(os.dup(shared.fd), 2 * PAGE + 1, is_writable=False)


def test_close_gives_back_the_mapping_and_the_descriptor() -> None:
    before = open_fds()
    segment = Segment.create("test", PAGE)
    fd, view = segment.fd, segment.view

    segment.close()

    assert open_fds() == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_what_still_looks_at_it_keeps_it_mapped() -> None:
    segment = Segment.create("test", PAGE)
    look = segment.view[:5]
    segment.view[:5] = b"hello"

    segment.close()

    assert bytes(look) == b"hello"
    del segment, look
    assert "iskander:test" not in Path("/proc/self/maps").read_text()


def test_the_other_side_keeps_the_bytes_when_the_maker_has_closed() -> None:
    maker = Segment.create("test", PAGE)
    other = Segment.attach(os.dup(maker.fd), PAGE, is_writable=False)
    maker.view[:5] = b"after"

    maker.close()

    assert bytes(other.view[:5]) == b"after"
    other.close()


def test_a_segment_has_no_name_and_does_not_pass_through_exec() -> None:
    """Nothing in /dev/shm to leak or to open; the descriptor closes itself in a child."""
    label = f"label-{os.getpid()}"
    segment = Segment.create(label, PAGE)

    assert not [name for name in os.listdir("/dev/shm") if label in name]
    assert os.readlink(f"/proc/self/fd/{segment.fd}") == f"/memfd:{label} (deleted)"
    assert not os.get_inheritable(segment.fd)
    segment.close()


def test_what_the_system_has_not_got_is_refused_by_name() -> None:
    with pytest.raises(SegmentError, match="creating a segment of"):
        Segment.create("test", 1 << 62)


def test_repr_shows_the_state_in_one_line(shared: Segment) -> None:
    assert repr(shared) == f"<Segment fd={shared.fd} {2 * PAGE} bytes rw>"


def smaps(segment: Segment) -> dict[str, str]:
    """What the kernel says of a segment's mapping here."""
    _, _, after = Path("/proc/self/smaps").read_text().partition(f"\n{segment.address:x}-")
    rows = (line.partition(":") for line in after.splitlines()[1:])
    found: dict[str, str] = {}
    for name, _, value in rows:
        if name in found:
            break
        found[name] = value.strip()
    return found


NO_HUGE_PAGES = pytest.mark.skipif(
    huge_pages_free() > 0 or transparent_rule() not in ("never", "deny"), reason="there are some"
)
RESERVED_PAGES = pytest.mark.skipif(
    huge_pages_free() < 3, reason="wants `sysctl vm.nr_hugepages=3`"
)
TRANSPARENT_PAGES = pytest.mark.skipif(
    huge_pages_free() > 0 or transparent_rule() not in ("always", "within_size", "advise"),
    reason="wants `advise` in shmem_enabled, and no reserved pages",
)


def test_a_segment_is_plain_memory_unless_more_is_asked_for(shared: Segment) -> None:
    assert shared.backing == Backing(2 * PAGE)
    assert str(shared.backing) == "0.0078125 MiB"


@NO_HUGE_PAGES
def test_without_huge_pages_it_is_small_ones_and_says_why() -> None:
    segment = Segment.create("test", HUGE_PAGE_BYTES + 1, BackingOptions(is_huge=True))

    assert len(segment) == 2 * HUGE_PAGE_BYTES
    assert segment.backing.huge_bytes == 0
    (complaint,) = segment.backing.complaints
    assert complaint == (
        "no reserved huge pages, Cannot allocate memory: 2 needed, 0 free "
        f"(vm.nr_hugepages); 0 MiB in transparent ones (shmem_enabled is {transparent_rule()})"
    )
    assert str(segment.backing) == "4 MiB"
    segment.view[-1] = 1
    segment.close()


@RESERVED_PAGES
def test_reserved_huge_pages_are_taken_sealed_and_given_back() -> None:
    free = huge_pages_free()
    options = BackingOptions(is_huge=True, is_locked=True)
    segment = Segment.create("test", HUGE_PAGE_BYTES + 1, options, is_read_only=True)

    assert segment.backing == Backing(2 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES, is_locked=True)
    assert str(segment.backing) == "4 MiB, 4 in huge pages, locked"
    assert smaps(segment)["KernelPageSize"] == "2048 kB"
    assert huge_pages_free() == free - 2
    assert fcntl.fcntl(segment.fd, GET_SEALS) == SHRINK | GROW | SEAL | FUTURE_WRITE
    # Asked for with the bytes that are used: a receiver maps whole pages all the same.
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
def test_more_than_is_reserved_is_small_pages_as_a_whole() -> None:
    free = huge_pages_free()
    segment = Segment.create("test", (free + 1) * HUGE_PAGE_BYTES, BackingOptions(is_huge=True))

    assert segment.backing.huge_bytes == 0
    assert f"{free + 1} needed, {free} free" in segment.backing.complaints[0]
    segment.close()
    assert huge_pages_free() == free


@TRANSPARENT_PAGES
def test_transparent_huge_pages_are_taken_where_none_are_reserved() -> None:
    segment = Segment.create("test", 2 * HUGE_PAGE_BYTES, BackingOptions(is_huge=True))

    mapped = smaps(segment)["ShmemPmdMapped"]
    assert mapped == f"{segment.backing.huge_bytes >> 10} kB"
    assert bool(segment.backing.complaints) is (segment.backing.huge_bytes < len(segment))
    segment.close()


@pytest.mark.skipif((lock_limit_bytes() or 4 * PAGE) < 4 * PAGE, reason="nothing may be locked")
def test_a_locked_segment_is_locked() -> None:
    segment = Segment.create("test", 2 * PAGE, BackingOptions(is_locked=True))

    assert segment.backing == Backing(2 * PAGE, is_locked=True)
    assert segment.backing.locked_bytes == 2 * PAGE
    assert "lo" in smaps(segment)["VmFlags"].split()
    segment.close()


def test_the_kernel_says_on_which_nodes_a_segment_lies() -> None:
    segment = Segment.create("test", 3 * PAGE, BackingOptions(node=0))
    if segment.backing.node is None:
        segment.close()
        pytest.skip("no policy here")

    node_bytes = mapped_node_bytes(segment.address)

    assert sum(node_bytes.values()) == 3 * PAGE
    assert bool(node_notice(0, node_bytes)) is (set(node_bytes) != {0})
    assert mapped_node_bytes(segment.address + 1) == {}
    segment.close()


def test_what_a_node_had_not_is_told_by_the_nodes_that_gave_it() -> None:
    assert node_notice(1, {1: HUGE_PAGE_BYTES}) == node_notice(1, {}) == ""
    assert node_notice(1, {2: PAGE, 1: PAGE, 0: HUGE_PAGE_BYTES}) == (
        "node 1 had not enough memory of this kind: 2 MiB of node 0, 0.00390625 MiB of node 2 was "
        "used"
    )


def test_a_limit_of_the_cgroup_is_not_called_a_bad_address() -> None:
    assert "their cgroup allows fewer: 1 needed" in huge_pages_notice(
        1, 0, OSError(errno.EFAULT, "Bad address")
    )
    assert "huge pages, no: 1 needed" in huge_pages_notice(1, 0, OSError(errno.ENOMEM, "no"))


def test_a_node_that_is_not_there_costs_the_policy_only() -> None:
    segment = Segment.create("test", 2 * PAGE, BackingOptions(node=1000))

    assert segment.backing.node is None
    (complaint,) = segment.backing.complaints
    assert complaint.startswith("no memory policy for node 1000: mbind was refused with E")
    segment.close()


@pytest.mark.parametrize(
    ("length_bytes", "pages"),
    [(0, 0), (1, 1), (HUGE_PAGE_BYTES, 1), (HUGE_PAGE_BYTES + 1, 2)],
)
def test_huge_pages_are_counted_whole(length_bytes: int, pages: int) -> None:
    assert huge_pages_needed(length_bytes) == pages


def test_reserved_pages_that_are_promised_are_not_free(tmp_path: Path) -> None:
    pool = tmp_path / "kernel/mm/hugepages/hugepages-2048kB"
    pool.mkdir(parents=True)
    (pool / "free_hugepages").write_text("5\n")
    (pool / "resv_hugepages").write_text("2\n")

    assert huge_pages_free(tmp_path) == 3
    assert huge_pages_free(tmp_path / "none") == 0


def test_the_rule_for_transparent_pages_is_the_one_in_brackets(tmp_path: Path) -> None:
    rule = tmp_path / "kernel/mm/transparent_hugepage/shmem_enabled"
    rule.parent.mkdir(parents=True)
    rule.write_text("always within_size [advise] never deny force\n")

    assert transparent_rule(tmp_path) == "advise"
    assert transparent_rule(tmp_path / "none") == "not there"
