"""Machines as trees of /proc and /sys: the files that `iskander.cli.doctor.facts` reads.

The formats are those of Linux 5.15 to 6.18; the values are typical ones, not recordings.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

GIB_KB = 1 << 20
_LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             {tasks}                {tasks}                processes
Max open files            1024                 {files}                files
Max locked memory         {locked}              {locked}              bytes
"""
_MEMORY = """\
MemTotal:       {total} kB
MemAvailable:   {available} kB
SwapTotal:      {swap} kB
CommitLimit:    {limit} kB
Committed_AS:   {committed} kB
"""
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
ROOT = "21 1 8:2 / / rw,relatime - ext4 /dev/sda2 rw"
THP = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
HUGE = "sys/kernel/mm/hugepages/hugepages-2048kB"
CLOCK = "sys/devices/system/clocksource/clocksource0"

Files = dict[str, str]


def machine(cpus: int, memory_gib: int, *, swap_gib: int = 0, **changes: str) -> Files:
    """An ordinary machine with one node; `changes` replace files, with `__` for `/`."""
    total = memory_gib * GIB_KB
    files = {
        "proc/self/status": f"Name:\tiskander\nUid:\t1000\t1000\t1000\t1000\n"
        f"CapEff:\t0000000000000000\nCpus_allowed_list:\t0-{cpus - 1}\n",
        "proc/self/limits": _LIMITS.format(tasks=31_000, files=1_048_576, locked=8_388_608),
        "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-1.scope\n",
        "proc/self/mountinfo": f"{ROOT}\n{V2}\n",
        "proc/self/environ": "HOME=/home/ada\0XDG_RUNTIME_DIR=/run/user/1000\0",
        "proc/meminfo": _MEMORY.format(
            total=total, available=total * 3 // 4, swap=swap_gib * GIB_KB, limit=total // 2,
            committed=total // 8,
        ),
        "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
        "proc/sys/kernel/numa_balancing": "0\n",
        "proc/sys/vm/overcommit_memory": "0\n",
        "proc/sys/net/core/somaxconn": "4096\n",
        "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
        "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304\n",
        THP: "always within_size advise [never] deny force\n",
        f"{HUGE}/nr_hugepages": "0\n",
        f"{HUGE}/free_hugepages": "0\n",
        f"{HUGE}/resv_hugepages": "0\n",
        f"{CLOCK}/current_clocksource": "tsc\n",
        f"{CLOCK}/available_clocksource": "tsc hpet acpi_pm \n",
        "sys/devices/system/node/node0/cpulist": f"0-{cpus - 1}\n",
    }  # fmt: skip
    return files | {name.replace("__", "/"): text for name, text in changes.items()}


def _frequency(cpus: int, driver: str, governor: str, preference: str = "") -> Files:
    files = {}
    for cpu in range(cpus):
        folder = f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        files[f"{folder}/scaling_driver"] = f"{driver}\n"
        files[f"{folder}/scaling_governor"] = f"{governor}\n"
        if preference:
            files[f"{folder}/energy_performance_preference"] = f"{preference}\n"
    return files


def _idle_states(*states: tuple[str, int, int]) -> Files:
    files = {}
    for index, (name, latency_us, disabled) in enumerate(states):
        folder = f"sys/devices/system/cpu/cpu0/cpuidle/state{index}"
        files |= {f"{folder}/name": name, f"{folder}/latency": f"{latency_us}"}
        files[f"{folder}/disable"] = f"{disabled}"
    return files


# A notebook: intel_pstate, deep idle states, swap.
LAPTOP = (
    machine(8, 16, swap_gib=8)
    | _frequency(8, "intel_pstate", "powersave", "balance_performance")
    | _idle_states(("POLL", 0, 0), ("C1E", 10, 0), ("C10", 890, 0))
)

# Two sockets, a systemd service with its own limits, reserved huge pages, NUMA balancing.
SERVICE = "/system.slice/iskander-gateway.service"
SERVER = (
    machine(32, 256)
    | _frequency(32, "acpi-cpufreq", "performance")
    | _idle_states(("POLL", 0, 0), ("C1", 2, 0), ("C6", 133, 1))
    | {
        "sys/devices/system/node/node0/cpulist": "0-15\n",
        "sys/devices/system/node/node1/cpulist": "16-31\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "proc/self/cgroup": f"0::{SERVICE}\n",
        "proc/self/environ": "INVOCATION_ID=4f\0NOTIFY_SOCKET=/run/n\0WATCHDOG_USEC=60000000\0",
        "proc/self/limits": _LIMITS.format(
            tasks="unlimited", files=65_536, locked="unlimited"
        ),
        "sys/fs/cgroup/system.slice/memory.max": "max\n",
        f"sys/fs/cgroup{SERVICE}/memory.max": f"{64 << 30}\n",
        f"sys/fs/cgroup{SERVICE}/pids.max": "4915\n",
        f"sys/fs/cgroup{SERVICE}/pids.current": "60\n",
        f"{HUGE}/nr_hugepages": "512\n",
        f"{HUGE}/free_hugepages": "400\n",
        f"{HUGE}/resv_hugepages": "16\n",
    }
)  # fmt: skip

# A container of cgroup v2 with its own cgroup namespace: 2 cpus of time on 16, 512 MiB, 64 tasks.
CONTAINER = machine(16, 64) | {
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "500 1 0:50 / / rw - overlay overlay rw\n"
    "501 500 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n",
    "sys/fs/cgroup/cpu.max": "200000 100000\n",
    "sys/fs/cgroup/cpu.stat": "usage_usec 9\nnr_periods 100\nnr_throttled 40\n"
    "throttled_usec 2500000\n",
    "sys/fs/cgroup/memory.max": f"{512 << 20}\n",
    "sys/fs/cgroup/pids.max": "64\n",
    "sys/fs/cgroup/pids.current": "3\n",
    "proc/sys/net/core/somaxconn": "128\n",
}

# A server whose governor holds the lowest frequency, with a slow clock and strict accounting.
POWERSAVE = (
    machine(4, 1)
    | _frequency(4, "acpi-cpufreq", "powersave")
    | {
        f"{CLOCK}/current_clocksource": "hpet\n",
        "proc/sys/vm/overcommit_memory": "2\n",
        "proc/sys/kernel/osrelease": "5.4.0-150-generic\n",
    }
)

# A container of cgroup v1 without a cgroup namespace: /proc has the paths of the host.
DOCKER = "/docker/3f5c"
CGROUP_V1 = machine(8, 32) | {
    "proc/self/cgroup": "".join(
        f"{number}:{controllers}:{DOCKER}\n"
        for number, controllers in ((9, "memory"), (5, "cpu,cpuacct"), (4, "pids"))
    )
    + f"1:name=systemd:{DOCKER}\n",
    "proc/self/mountinfo": "".join(
        f"6{number} 1 0:3{number} {DOCKER} /sys/fs/cgroup/{names} ro - cgroup cgroup rw,{names}\n"
        for number, names in enumerate(("memory", "cpu,cpuacct", "pids"))
    ),
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 << 30}\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 9\nnr_throttled 7\nthrottled_time 3000000\n",
    "sys/fs/cgroup/pids/pids.max": "max\n",
}


def write_tree(files: Files, folder: Path) -> Path:
    """Write the files of a machine to a new folder in a folder; return it."""
    root = Path(tempfile.mkdtemp(dir=folder))
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
