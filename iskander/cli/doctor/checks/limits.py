"""Checks of limits: descriptors, threads, the queue of new connections, TCP buffers.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from iskander.gateway.transport.acceptor import BACKLOG
from iskander.gateway.transport.limits.descriptors import RESERVED_MAX

TCP_BYTES = 4 << 20
"""Bytes in flight on 10 Gbit/s with a round trip of 3 ms."""
_TCP = ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem")
LOOPBACK = ("127.", "localhost", "[::1]", "unix:")


def check_files(subject: Subject) -> Iterator[Finding]:
    """Open files, against the connection limits."""
    limit, needed = subject.facts.limits.files, subject.demand.files
    why = "At the limit, new connections are rejected, below `limits.connections` too."
    if limit is None or limit >= needed:
        allowed = "any number" if limit is None else f"{limit:,}"
        found = f"{needed:,} needed for all connections, {allowed} allowed (hard limit)"
        yield Finding("open_files", State.OK, found, why)
        return
    found = (
        f"{needed:,} needed for all connections, {limit:,} allowed (hard limit): about "
        f"{max(limit - min(RESERVED_MAX, limit // 4), 1):,} connections are accepted"
    )
    fix = f"{set_unit(f'LimitNOFILE={needed}')}; in a shell: ulimit -Hn {needed}"
    yield Finding("open_files", State.WARNING, found, why, fix, UNDO_UNIT)


def check_tasks(subject: Subject) -> Iterator[Finding]:
    """Threads, against the limits of the control group and the user."""
    facts, needed = subject.facts, subject.demand.tasks
    group, own = facts.cgroup.tasks, facts.limits.tasks
    why = "A process that cannot start a thread ends; a worker then restarts in a loop."
    limits = []
    if group is not None:
        limits.append((group - facts.cgroup.tasks_used, "of the control group (pids.max)"))
    if own is not None and facts.uid != 0:
        limits.append((own, "of the user (RLIMIT_NPROC)"))
    if not limits:
        yield Finding("threads", State.OK, f"about {needed:,} needed, no limit", why)
        return
    left, name = min(limits)
    found = f"about {needed:,} needed, {left:,} left {name}"
    if left >= needed:
        yield Finding("threads", State.OK, found, why)
        return
    wanted = needed + facts.cgroup.tasks_used
    fix = f"{set_property(f'TasksMax={2 * wanted}')}; docker run --pids-limit {2 * wanted}"
    yield Finding("threads", State.PROBLEM, found, why, fix, UNDO_UNIT)


def check_backlog(subject: Subject) -> Iterator[Finding]:
    """Queue of connections that wait to be accepted."""
    limit = subject.facts.kernel.somaxconn
    why = (
        "When many clients connect at once, after a restart for example, a connection beyond the "
        "queue is retried by its client after 1 s."
    )
    if limit is None or limit >= BACKLOG:
        shown = "not visible" if limit is None else f"{limit:,}"
        found = f"net.core.somaxconn {shown}, {BACKLOG:,} requested"
        yield Finding("backlog", State.OK, found, why)
        return
    found = f"net.core.somaxconn = {limit:,}, {BACKLOG:,} requested"
    name = "net.core.somaxconn"
    fix, undo = set_sysctl(name, 4096), set_sysctl(name, limit)
    yield Finding("backlog", State.WARNING, found, why, fix, undo)


def check_tcp_buffers(subject: Subject) -> Iterator[Finding]:
    """Largest buffers of TCP, for clients on other machines."""
    ranges, addresses = subject.facts.kernel.tcp_ranges, subject.demand.config.addresses
    why = "The buffer limits the bytes in flight: 4 MiB are 10 Gbit/s with a round trip of 3 ms."
    if all(address.startswith(LOOPBACK) for address in addresses):
        found = "all clients are on this machine, where the buffers do not limit"
        yield Finding("tcp_buffers", State.OK, found, why)
    elif len(ranges) != len(_TCP):
        yield Finding("tcp_buffers", State.OK, "not visible here", why)
    else:
        (*_, received), (*_, sent) = ranges
        found = f"receive up to {mib(received)}, send up to {mib(sent)}"
        if min(received, sent) >= TCP_BYTES:
            yield Finding("tcp_buffers", State.OK, found, why)
            return
        fix = _set_buffers([(*least, 4 * TCP_BYTES) for *least, _ in ranges])
        yield Finding("tcp_buffers", State.NOTE, found, why, fix, _set_buffers(ranges))


def _set_buffers(ranges: Sequence[tuple[int, ...]]) -> str:
    pairs = zip(_TCP, ranges, strict=True)
    return " && ".join(f"sysctl -w {name}='{' '.join(map(str, values))}'" for name, values in pairs)


CHECKS: tuple[Check, ...] = (check_files, check_tasks, check_backlog, check_tcp_buffers)
