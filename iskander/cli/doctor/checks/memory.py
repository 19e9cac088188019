"""Checks of memory: capacity, huge pages, locked memory, swap, overcommit.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from iskander.cli.doctor.checks.subject import (
    UNDO_UNIT,
    Check,
    Subject,
    mib,
    set_property,
    set_sysctl,
    set_unit,
)
from iskander.cli.doctor.finding import Finding, State
from iskander.interprocess.memory.backing import HUGE_PAGE_BYTES

SMALL_PAGE_BYTES = 4096
STRICT = 2
"""`vm.overcommit_memory` with strict accounting."""
_TRANSPARENT = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def check_capacity(subject: Subject) -> Iterator[Finding]:
    """Check that arenas and processes fit in the memory of the machine and the control group."""
    facts, demand = subject.facts, subject.demand
    group, total = facts.cgroup.memory_bytes, facts.memory.total
    limit = min(total, group or total)
    limit_name = "the control group's limit" if group and group < total else "the memory"
    arenas, private = sum(demand.arenas), demand.private_bytes
    found = (
        f"arenas {mib(arenas)} and processes about {mib(private)} without models, "
        f"{limit_name} is {mib(limit)}, {mib(facts.memory.available)} available on the machine"
    )
    why = "Arenas are allocated completely at startup, which fails with exit code 71 without memory"
    fix = (
        set_property(f"MemoryMax={(arenas + private) * 3 // 2}")
        if limit == group
        else "lower arena.input_bytes, arena.output_bytes or workers.count in the configuration"
    )
    undo = UNDO_UNIT if limit == group else "set the former values"
    if arenas > limit:
        yield Finding("memory", State.PROBLEM, found, f"{why}.", fix, undo)
    elif arenas + private > limit:
        why += "; above the limit the kernel ends a process (OOM)."
        yield Finding("memory", State.WARNING, found, why, fix, undo)
    elif arenas > facts.memory.available:
        why += ". A gateway that runs now has its memory already."
        yield Finding("memory", State.WARNING, found, why, fix, undo)
    else:
        yield Finding("memory", State.OK, found, f"{why}.")


def check_huge_pages(subject: Subject) -> Iterator[Finding]:
    """Check that there are huge pages for the arenas, reserved or transparent."""
    memory, demand, group = subject.facts.memory, subject.demand, subject.facts.cgroup
    small = sum(demand.arenas) // SMALL_PAGE_BYTES
    why = (
        f"The arenas are {small:,} pages of 4 KiB or {demand.huge_pages:,} of 2 MiB; copies of "
        "large batches miss the TLB less with the latter."
    )
    if not demand.config.arena.huge_pages:
        found = f"not requested (arena.huge_pages = false); {memory.huge_pages_free} reserved, free"
        yield Finding("huge_pages", State.OK, found, why)
        return
    found = f"{demand.huge_pages} needed, {memory.huge_pages_free} reserved and free"
    if group.huge_bytes is not None and group.huge_bytes < demand.huge_pages * HUGE_PAGE_BYTES:
        found += f", {mib(group.huge_bytes)} allowed by the control group"
        name = "hugetlb.2MB.max" if group.version == 2 else "hugetlb.2MB.limit_in_bytes"
        wanted = demand.huge_pages * HUGE_PAGE_BYTES
        fix, undo = (
            f"echo {size} > {name}   # in {group.path}" for size in (wanted, group.huge_bytes)
        )
        yield Finding("huge_pages", State.WARNING, found, why, fix, undo)
    elif memory.huge_pages_free >= demand.huge_pages:
        yield Finding("huge_pages", State.OK, found, why)
    else:
        wanted = memory.huge_pages + demand.huge_pages - memory.huge_pages_free
        yield Finding(
            "huge_pages",
            State.WARNING,
            found,
            why,
            set_sysctl("vm.nr_hugepages", wanted),
            set_sysctl("vm.nr_hugepages", memory.huge_pages),
        )
        yield _transparent(memory.transparent)


def _transparent(rule: str) -> Finding:
    why = "Transparent huge pages replace missing reserved ones, if the kernel finds free ones."
    found = f"shmem_enabled is {rule}"
    if rule not in ("never", "deny"):  # They are on, or the kernel has none.
        return Finding("transparent_huge_pages", State.OK, found, why)
    fix, undo = (f"echo {value} > {_TRANSPARENT}" for value in ("advise", rule))
    return Finding("transparent_huge_pages", State.WARNING, found, why, fix, undo)


def check_locked_memory(subject: Subject) -> Iterator[Finding]:
    """Check that the limit of locked memory permits the arenas."""
    facts, demand = subject.facts, subject.demand
    limit, needed = facts.limits.locked_bytes, sum(demand.arenas)
    allowed = "any amount" if limit is None or facts.has_lock_capability else mib(limit)
    if not demand.config.arena.lock:
        found = f"not requested (arena.lock = false); {allowed} allowed"
        yield Finding("locked_memory", State.OK, found)
        return
    found = f"{mib(needed)} needed, {allowed} allowed"
    why = "An arena above the limit is not locked, and its pages can be swapped out."
    if limit is None or facts.has_lock_capability or limit >= needed:
        yield Finding("locked_memory", State.OK, found, why)
    else:
        fix = f"{set_unit('LimitMEMLOCK=infinity')}; in a shell: ulimit -l unlimited"
        yield Finding("locked_memory", State.WARNING, found, why, fix, UNDO_UNIT)


def check_swap(subject: Subject) -> Iterator[Finding]:
    """Check whether the arenas can be swapped out."""
    swap = subject.facts.memory.swap
    why = "A batch that reads a swapped page waits for the disk: 0.1 to 10 ms a page."
    if not swap:
        yield Finding("swap", State.OK, "no swap space", why)
    elif subject.demand.config.arena.lock:
        yield Finding("swap", State.OK, f"{mib(swap)}, and the arenas are locked", why)
    else:
        found = f"{mib(swap)}, and the arenas are not locked"
        fix, undo = (
            f"set arena.lock = {value} in the configuration" for value in ("true", "false")
        )
        yield Finding("swap", State.NOTE, found, why, fix, undo)


def check_overcommit(subject: Subject) -> Iterator[Finding]:
    """Check that the arenas fit if the kernel accounts memory strictly."""
    memory, needed = subject.facts.memory, sum(subject.demand.arenas)
    found = f"vm.overcommit_memory = {memory.overcommit}"
    why = "With strict accounting, arenas, model weights and thread stacks count in full."
    if memory.overcommit != STRICT:
        yield Finding("overcommit", State.OK, found, why)
        return
    found += f", {mib(memory.uncommitted)} left, arenas {mib(needed)}"
    state = State.PROBLEM if needed > memory.uncommitted else State.NOTE
    fix, undo = (set_sysctl("vm.overcommit_memory", value) for value in (0, STRICT))
    yield Finding("overcommit", state, found, why, fix, undo)


CHECKS: tuple[Check, ...] = (
    check_capacity,
    check_huge_pages,
    check_locked_memory,
    check_swap,
    check_overcommit,
)
