"""Runs a command with denied calls: `sandbox.py [--refuse CALL]... [--lock BYTES] COMMAND`.

Emulates a container's seccomp profile and a service's limits: the named system calls fail with
EPERM, and locked memory is limited, also for root. Source: seccomp(2), prctl(2), linux/filter.h.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import platform
import resource
import struct
import sys

CALLS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "sched_setaffinity": 203, "mlock": 149},
    "aarch64": {"mbind": 235, "set_mempolicy": 237, "sched_setaffinity": 122, "mlock": 228},
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 38, 22, 24
_MODE_FILTER = 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_CAP_IPC_LOCK = 14


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refuse(names: list[str]) -> None:
    """Let these calls fail with EPERM, in this process and its children."""
    numbers = [CALLS[platform.machine()][name] for name in names]
    steps = [(_LOAD_WORD, 0, 0, 0)]
    for left, number in zip(reversed(range(len(numbers))), numbers, strict=True):
        steps.append((_JUMP_IF_EQUAL, left + 1, 0, number))
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    code = b"".join(struct.pack("<HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))


def limit_lock(length_bytes: int) -> None:
    """Limit locked memory from the next `exec` on; root loses its privilege too."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (length_bytes, length_bytes))
    if os.geteuid() == 0:
        _prctl(_PR_CAPBSET_DROP, _CAP_IPC_LOCK)


def _prctl(option: int, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    padded = (*arguments, *(ctypes.c_ulong(0),) * (4 - len(arguments)))
    if libc.prctl(option, *padded):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--refuse", action="append", default=[])
    parser.add_argument("--lock", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.lock is not None:
        limit_lock(arguments.lock)
    if arguments.refuse:
        refuse(arguments.refuse)
    os.execv(arguments.command[0], arguments.command)


if __name__ == "__main__":
    sys.exit(main())
