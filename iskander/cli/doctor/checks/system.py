"""Checks of the system: kernel, clock, folders, systemd unit.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from iskander.cli.doctor.checks.subject import UNDO_UNIT, Check, Subject, mib, set_unit
from iskander.cli.doctor.finding import Finding, State
from iskander.cli.doctor.probes import Folder

OLDEST_KERNEL = (5, 14)
"""madvise(MADV_POPULATE_WRITE), which allocates the arenas; pidfd_open is older."""
FAST_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
"""Clocks that a process reads without a system call."""
NETWORK_KINDS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "virtiofs")
_CLOCK = "/sys/devices/system/clocksource/clocksource0/current_clocksource"


def check_kernel(subject: Subject) -> Iterator[Finding]:
    """Kernel version, and the system calls that a start needs."""
    kernel, probes = subject.facts.kernel, subject.probes
    least = ".".join(map(str, OLDEST_KERNEL))
    found = f"Linux {kernel.release}, {least} needed"
    why = f"Before Linux {least} the kernel cannot allocate a whole arena at startup."
    is_new = kernel.version >= OLDEST_KERNEL
    fix = "" if is_new else f"install a kernel of version {least} or later"
    undo = "boot the former kernel" if fix else ""
    yield Finding("kernel", State.OK if is_new else State.PROBLEM, found, why, fix, undo)
    why = "Arenas are sealed memfds: without them no gateway starts."
    fix = "allow memfd_create and fcntl in the seccomp profile; sysctl -w vm.memfd_noexec=0"
    yield _attempted("memfd", probes.segment, "memfds can be created and sealed", why, fix)
    why = "The supervisor waits for its workers by pidfds."
    fix = "allow pidfd_open and pidfd_send_signal in the seccomp profile"
    yield _attempted("pidfd", probes.pidfd, "pidfd_open is allowed", why, fix)


def _attempted(check: str, error: str, success: str, why: str, fix: str) -> Finding:
    if not error:
        return Finding(check, State.OK, success, why)
    return Finding(check, State.PROBLEM, error, why, fix, "use the former profile and value")


def check_clock(subject: Subject) -> Iterator[Finding]:
    """Clock source of the kernel."""
    kernel = subject.facts.kernel
    found = f"{kernel.clock_source or 'not visible'}"
    why = (
        "Every batch reads the clock several times: 20 to 50 ns in the process, but a system call "
        "of up to a microsecond with other clock sources."
    )
    if not kernel.clock_source or kernel.clock_source in FAST_CLOCKS:
        yield Finding("clock", State.OK, found, why)
        return
    available = [name for name in FAST_CLOCKS if name in kernel.clock_sources]
    if available:
        fix, undo = (f"echo {name} > {_CLOCK}" for name in (available[0], kernel.clock_source))
    else:
        found += f"; available: {', '.join(kernel.clock_sources)}"
        fix, undo = f"use a machine with one of {', '.join(FAST_CLOCKS)}", "use the former machine"
    yield Finding("clock", State.WARNING, found, why, fix, undo)


def check_runtime_directory(subject: Subject) -> Iterator[Finding]:
    """Owner and mode of the runtime directory."""
    folder, uid = subject.probes.runtime, subject.facts.uid
    why = "Who can write in it can replace the socket to which workers attach."
    found = _describe(folder)
    if not folder.is_there:
        yield Finding("runtime_directory", State.OK, f"{found}; created at startup", why)
    elif folder.uid != uid:
        found += f", but the process has user {uid}"
        fix, undo = f"chown {uid} {folder.path}", f"chown {folder.uid} {folder.path}"
        yield Finding("runtime_directory", State.PROBLEM, found, why, fix, undo)
    elif folder.mode & 0o022:
        fix, undo = f"chmod 0700 {folder.path}", f"chmod {folder.mode:04o} {folder.path}"
        yield Finding("runtime_directory", State.WARNING, found, why, fix, undo)
    else:
        yield Finding("runtime_directory", State.OK, found, why)


def check_cache(subject: Subject) -> Iterator[Finding]:
    """File system, mode and space of the cache of optimized models."""
    folder, loading = subject.probes.cache, subject.demand.config.loading
    why = "Workers map the cached weights; each has a copy of its own without the cache."
    change = "set loading.cache in the configuration to a folder on a local disk"
    if not loading.share_weights:
        yield Finding("cache", State.OK, "not used (loading.share_weights = false)", why)
        return
    if not folder.path:
        found = "no folder: neither loading.cache nor a home folder is set"
        yield Finding("cache", State.WARNING, found, why, change, "remove the setting")
        return
    found = f"{_describe(folder)}, {mib(folder.free_bytes)} free"
    if folder.kind in NETWORK_KINDS or folder.kind.startswith("fuse"):
        why = "A process that reads a mapped file of a lost network file system ends with SIGBUS."
        yield Finding("cache", State.WARNING, found, why, change, "remove the setting")
    elif folder.is_there and (folder.uid != subject.facts.uid or folder.mode & 0o022):
        why = "A cache that others can write is not used: they could replace a model."
        fix = f"chown {subject.facts.uid} {folder.path} && chmod 0700 {folder.path}"
        undo = f"chown {folder.uid} {folder.path} && chmod {folder.mode:04o} {folder.path}"
        yield Finding("cache", State.WARNING, found, why, fix, undo)
    elif folder.kind in ("tmpfs", "ramfs"):
        why = "Files of this file system are memory, and are lost at a reboot."
        yield Finding("cache", State.NOTE, found, why, change, "remove the setting")
    else:
        yield Finding("cache", State.OK, found, why)


def _describe(folder: Folder) -> str:
    if not folder.is_there:
        return f"{folder.path} does not exist yet, on {folder.kind or 'an unknown file system'}"
    return f"{folder.path}: user {folder.uid}, mode {folder.mode:04o}, {folder.kind}"


def check_unit(subject: Subject) -> Iterator[Finding]:
    """Facts of the systemd unit, if the process runs in one."""
    facts = subject.facts
    environment = dict(facts.environment)
    unit = next((p for p in reversed(facts.cgroup.path.split("/")) if p.endswith(".service")), "")
    if "INVOCATION_ID" not in environment or not unit:
        found = "the process is not in a systemd service; --pid examines a running gateway"
        yield Finding("systemd", State.OK, found)
        return
    has_notify = "NOTIFY_SOCKET" in environment
    watchdog_s = int(environment.get("WATCHDOG_USEC") or 0) / 1e6
    watchdog = f"watchdog {watchdog_s:g} s" if watchdog_s else "no watchdog"
    found = f"{unit}: {'notifications' if has_notify else 'no notifications'}, {watchdog}"
    why = (
        "With Type=notify systemd waits for ready models, and with WatchdogSec= it restarts a "
        "gateway whose event loop is blocked."
    )
    if has_notify and watchdog_s:
        yield Finding("systemd", State.OK, found, why)
    else:
        fix = set_unit("Type=notify WatchdogSec=60")
        yield Finding("systemd", State.NOTE, found, why, fix, UNDO_UNIT)


CHECKS: tuple[Check, ...] = (
    check_kernel,
    check_clock,
    check_runtime_directory,
    check_cache,
    check_unit,
)
