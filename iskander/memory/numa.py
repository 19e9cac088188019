"""Which NUMA node's memory is preferred: by a thread for what it touches, or for one mapping.

Preferred, not bound: memory of another node is slower, and a node that is full would otherwise end
a process. A refusal costs no start either; it comes back as words for the operator.

Runs on: gateway and worker.

Source: set_mempolicy(2), mbind(2), Documentation/admin-guide/mm/numa_memory_policy.rst; the numbers
from syscall_64.tbl and asm-generic/unistd.h of the Linux kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable

_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}

Call = Callable[..., int]
"""Makes a system call by its number; returns 0, or the error's number."""


def system_call(number: int, *arguments: object) -> int:
    """Ask the kernel."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *arguments) else 0


def prefer_node(node: int, call: Call = system_call) -> str:
    """Take this thread's memory, and that of threads it starts, from a node where it has some.

    Returns:
        Why it was refused; empty where it was not.
    """
    mask, bits = _mask(node)
    return _ask("set_mempolicy", _SET_MEMPOLICY, call, node, (_MPOL_PREFERRED, mask, bits))


def prefer_node_for(address: int, length_bytes: int, node: int, call: Call = system_call) -> str:
    """Take a mapping's pages from a node; of a shared mapping, for whoever touches them first.

    Returns:
        Why it was refused; empty where it was not.
    """
    mask, bits = _mask(node)
    where = (ctypes.c_void_p(address), ctypes.c_ulong(length_bytes))
    return _ask("mbind", _MBIND, call, node, (*where, _MPOL_PREFERRED, mask, bits, ctypes.c_uint()))


def _mask(node: int) -> tuple[ctypes.Array[ctypes.c_ulong], ctypes.c_ulong]:
    """The set of one node, and its length in bits, which the kernel wants larger by one."""
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << (node % 64)
    return mask, ctypes.c_ulong(len(mask) * 64 + 1)


def _ask(
    name: str, numbers: dict[str, int], call: Call, node: int, arguments: tuple[object, ...]
) -> str:
    machine = platform.machine()
    if machine not in numbers:
        return f"no memory policy for node {node}: the number of {name} is not known on {machine}"
    error = call(numbers[machine], *arguments)
    if not error:
        return ""
    code = errno.errorcode.get(error, str(error))
    meaning = _MEANINGS.get(error) or os.strerror(error)
    return f"no memory policy for node {node}: {name} was refused with {code}: {meaning}"


_MEANINGS = {
    errno.EPERM: "the sandbox does not allow it; a container may with CAP_SYS_NICE or a seccomp "
    "profile of its own",
    errno.ENOSYS: "this kernel was built without NUMA",
    errno.EINVAL: "the node has no memory, or not for this process (cpuset.mems)",
}
