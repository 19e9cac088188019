"""NUMA memory policy: prefers the memory of a node for a thread or for one mapping.

Preferred, not bound: with a binding, a full node would end the process, while memory of another
node is only slower. A failure is returned as text for the operator.

Runs on: gateway and worker. Source: set_mempolicy(2), mbind(2),
Documentation/admin-guide/mm/numa_memory_policy.rst; the numbers from syscall_64.tbl and
asm-generic/unistd.h of the Linux kernel.
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
"""Makes a system call by its number; returns 0 or the errno."""


def system_call(number: int, *arguments: object) -> int:
    """Make a system call."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *arguments) else 0


def prefer_node(node: int, call: Call = system_call) -> str:
    """Prefer a node for the memory of this thread, and of threads that this thread starts.

    Returns text that says why the call failed; empty on success.
    """
    mask, bits = _node_mask(node)
    return _set_policy("set_mempolicy", _SET_MEMPOLICY, call, node, (_MPOL_PREFERRED, mask, bits))


def prefer_node_for(address: int, length_bytes: int, node: int, call: Call = system_call) -> str:
    """Prefer a node for the pages of a mapping; for a shared mapping, also in other processes.

    Returns text that says why the call failed; empty on success.
    """
    mask, bits = _node_mask(node)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(length_bytes), _MPOL_PREFERRED, mask)
    return _set_policy("mbind", _MBIND, call, node, (*arguments, bits, ctypes.c_uint()))


def _node_mask(node: int) -> tuple[ctypes.Array[ctypes.c_ulong], ctypes.c_ulong]:
    """Return the mask of a node, and the mask's length in bits plus one, as the kernel requires."""
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << (node % 64)
    return mask, ctypes.c_ulong(len(mask) * 64 + 1)


def _set_policy(
    name: str, numbers: dict[str, int], call: Call, node: int, arguments: tuple[object, ...]
) -> str:
    machine = platform.machine()
    if machine not in numbers:
        return f"no memory policy for node {node}: the number of {name} is not known on {machine}"
    error = call(numbers[machine], *arguments)
    if not error:
        return ""
    code = errno.errorcode.get(error, str(error))
    meaning = _MEANINGS_OF_ERRNO.get(error) or os.strerror(error)
    return f"no memory policy for node {node}: {name} was refused with {code}: {meaning}"


_MEANINGS_OF_ERRNO = {
    errno.EPERM: "the sandbox does not allow it; a container needs CAP_SYS_NICE or its own seccomp "
    "profile",
    errno.ENOSYS: "this kernel was built without NUMA",
    errno.EINVAL: "the node has no memory, or not for this process (cpuset.mems)",
}
