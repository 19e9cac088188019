"""Checks of cpus: frequency, idle states, quota, placement, NUMA.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from iskander.cli.doctor.checks.subject import UNDO_UNIT, Check, Subject, set_property, set_sysctl
from iskander.cli.doctor.finding import Finding, State
from iskander.gateway.supervision.placement.topology import render_cpu_list

DYNAMIC_DRIVERS = ("intel_pstate", "amd-pstate-epp")
"""Drivers whose governor `powersave` follows the load; another's stays at the lowest frequency."""
SLOW_IDLE_US = 50
"""Exit latency of an idle state that a round trip of 280 us for 128 rows notices."""
_GOVERNORS = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
_PREFERENCES = "/sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference"


def check_governor(subject: Subject) -> Iterator[Finding]:
    """Frequency governor."""
    cpus = subject.facts.cpus
    if not cpus.governors:
        found = "no cpufreq: the hypervisor or the firmware controls the frequency"
        yield Finding("governor", State.OK, found)
        return
    found = f"{', '.join(cpus.governors)} with {cpus.driver or 'an unknown driver'}"
    why = (
        "An idle core at a low frequency runs a small batch slower until the governor reacts, "
        "often for 10 ms and more."
    )
    lowest, is_dynamic = "powersave" in cpus.governors, cpus.driver in DYNAMIC_DRIVERS
    fix, undo = (f"echo {each} | tee {_GOVERNORS}" for each in ("performance", cpus.governors[0]))
    if is_dynamic and lowest:
        found += f", energy preference {', '.join(cpus.preferences) or 'unknown'}"
        if cpus.preferences == ("performance",):
            yield Finding("governor", State.OK, found, why)
        else:
            earlier = next(iter(cpus.preferences), "default")
            fix, undo = (f"echo {each} | tee {_PREFERENCES}" for each in ("performance", earlier))
            yield Finding("governor", State.NOTE, found, why, fix, undo)
    elif lowest:
        yield Finding("governor", State.WARNING, found, why, fix, undo)
    elif set(cpus.governors) == {"performance"}:
        yield Finding("governor", State.OK, found, why)
    else:
        yield Finding("governor", State.NOTE, found, why, fix, undo)


def check_idle_states(subject: Subject) -> Iterator[Finding]:
    """Exit latency of the enabled idle states."""
    states = subject.facts.cpus.idle_states
    if not states:
        yield Finding("idle_states", State.OK, "none listed: the hypervisor or firmware has them")
        return
    deepest = states[-1]
    found = f"deepest enabled: {deepest.name}, exit latency {deepest.latency_us} us"
    why = (
        "Gateway and worker wake each other for every batch, and a deep sleep delays each wake-up."
    )
    if deepest.latency_us < SLOW_IDLE_US:
        yield Finding("idle_states", State.OK, found, why)
        return
    fix = f"cpupower idle-set -D {SLOW_IDLE_US - 1}"
    yield Finding("idle_states", State.NOTE, found, why, fix, "cpupower idle-set -E")


def check_quota(subject: Subject) -> Iterator[Finding]:
    """Quota of cpu time, against the cpus of the placement."""
    facts = subject.facts
    quota, count = facts.cgroup.cpus, facts.cpus.total
    why = (
        "A quota stops all threads until the end of a period of usually 100 ms once they have used "
        "it up, and compute threads on every cpu use it up early."
    )
    if quota is None:
        yield Finding("cpu_quota", State.OK, f"none, {count} cpus", why)
        return
    found = f"{quota:g} cpus of time on {count} cpus"
    if facts.cgroup.throttled:
        lost_s = facts.cgroup.throttled_us / 1e6
        found += f"; used up in {facts.cgroup.throttled:,} periods, {lost_s:,.1f} s lost"
    if quota >= count and not facts.cgroup.throttled:
        yield Finding("cpu_quota", State.OK, found, why)
        return
    numbers = [cpu.number for cpu in facts.cpus.topology.cpus][: max(int(quota), 1)]
    fix = f'set workers.groups = ["{render_cpu_list(numbers)}"] in the configuration, or '
    fix += set_property(f"CPUQuota={count * 100}%")
    yield Finding(
        "cpu_quota", State.WARNING, found, why, fix, f"remove the setting, or {UNDO_UNIT}"
    )


def check_placement(subject: Subject) -> Iterator[Finding]:
    """Notes of the placement plan."""
    placed = subject.demand.placed
    found = f"gateway on cpus {render_cpu_list(placed.gateway) or 'any'}"
    found += f", workers: {len(placed.slots)}"
    why = "Processes that share a core take turns on it."
    if not placed.notes:
        yield Finding("placement", State.OK, found, why)
    for note in placed.notes:
        fix = "set server.cores, workers.groups or workers.count in the configuration"
        undo = "set the former values"
        yield Finding("placement", State.NOTE, f"{found}; {note}", why, fix, undo)


def check_numa(subject: Subject) -> Iterator[Finding]:
    """NUMA nodes: balancing by the kernel, and the permission for memory policies."""
    cpus = subject.facts.cpus
    nodes = len(cpus.topology.nodes)
    if nodes < 2:
        yield Finding("numa", State.OK, "one NUMA node")
        return
    found = f"{nodes} NUMA nodes, kernel.numa_balancing = {int(bool(cpus.is_balancing))}"
    why = (
        "The kernel unmaps pages to see who uses them and moves them between nodes; pinned workers "
        "have theirs on their node already."
    )
    fix, undo = (set_sysctl("kernel.numa_balancing", value) for value in (0, 1))
    if cpus.is_balancing:
        yield Finding("numa", State.WARNING, found, why, fix, undo)
    else:
        yield Finding("numa", State.OK, found, why)
    why = "Without a memory policy, an output arena is on the gateway's node, not on its worker's."
    if policy := subject.probes.memory_policy:
        fix = "docker run --cap-add SYS_NICE ..."
        undo = "remove the capability"
        yield Finding("memory_policy", State.WARNING, policy, why, fix, undo)
    else:
        yield Finding("memory_policy", State.OK, "mbind is allowed", why)


CHECKS: tuple[Check, ...] = (
    check_placement,
    check_governor,
    check_idle_states,
    check_quota,
    check_numa,
)
