"""`iskander-worker`: registers at a gateway, pins its process, loads models, runs batches.

Imports are late on purpose: the slot arrives over the attach socket, then the process is pinned,
and only then are NumPy and ONNX Runtime imported, so that their threads and pages are allocated on
the right cores.

Exit codes: 0 drained; 2 wrong usage; 69 no gateway; 70 a bug; 71 the system refused memory;
74 a fault of the GPU; 76 the gateway speaks another version or rejected this worker; 78 the
interpreter of the model's workers lacks something.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from iskander import __version__
from iskander.errors import NotReady, ProtocolError, SegmentError
from iskander.foundation import clock
from iskander.foundation.build_info import describe
from iskander.foundation.exit_codes import ExitCode, summary
from iskander.foundation.logs import workers as log
from iskander.foundation.logs.stderr import set_up_worker
from iskander.interprocess.control import attach
from iskander.interprocess.control.identity import gateway_id
from iskander.interprocess.control.messages import PROTOCOL_VERSION, Hello, Welcome
from iskander_worker.affinity import pin_process, raise_oom_score, set_library_environment
from iskander_worker.devices.cuda import DeviceLost

if TYPE_CHECKING:
    from iskander_worker.loop import WorkerLoop

EXIT_CODES = {
    NotReady: ExitCode.UNAVAILABLE,
    SegmentError: ExitCode.MEMORY,
    ProtocolError: ExitCode.PROTOCOL,
}
CONNECT_PAUSE_S = 0.05
ANSWER_TIMEOUT_S = 600.0
"""The gateway allocates this worker's memory before it answers: a second or two for a GiB."""
SWITCH_S = 0.0002
"""Interpreter switch interval. A batch may wait that long for the loading thread; default 5 ms."""


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(
        prog="iskander-worker",
        description="Run models for an iskander-gateway: attach to its socket, pin this process "
        "to the cores that the gateway assigns, load the models and compute batches.",
        epilog="SIGTERM finishes the running batches and exits 0. When the gateway dies, the "
        "worker keeps its models and waits for the next one; an orderly stop ends it. "
        f"{summary('iskander-worker')}",
    )
    parser.add_argument(
        "--attach",
        metavar="SOCKET",
        help="attach socket of the gateway: RUNTIME_DIRECTORY/attach.sock",
    )
    # Internal: load one model on so many cores, and answer on standard output.
    parser.add_argument("--try", type=int, dest="cores", help=argparse.SUPPRESS)
    parser.add_argument(
        "--group", type=int, metavar="N", help="the core group to serve in (default: any)"
    )
    parser.add_argument(
        "--pool",
        default="",
        metavar="NAME/VERSION",
        help="model with a pool of its own (default: shared pool)",
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="timeout for the first gateway; 0 for none (default: 30)",
    )
    parser.add_argument("--version", action="version", version=describe("iskander-worker"))
    arguments = parser.parse_args()
    set_up_worker()
    if arguments.cores is not None:
        set_library_environment()
        from iskander_worker.sandbox.check import run_check

        return run_check(arguments.cores)
    if arguments.attach is None:
        parser.error("the following arguments are required: --attach")
    # The loop installs its own handlers; before that there is nothing to finish.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.DONE))
    try:
        sys.exit(_work(arguments))
    except (NotReady, ProtocolError, SegmentError) as error:
        log.worker_failed(reason=error.message)
        sys.exit(EXIT_CODES[type(error)])
    except DeviceLost as error:
        log.worker_device_lost(error=error)
        os._exit(ExitCode.DEVICE)  # Destructors of the runtime use the device, and can hang.
    except AssertionError as error:
        log.worker_bug(error=error)
        sys.exit(ExitCode.BUG)


def _work(arguments: argparse.Namespace) -> int:
    raise_oom_score()
    set_library_environment()
    sys.setswitchinterval(SWITCH_S)
    path: str = arguments.attach
    hello = Hello(PROTOCOL_VERSION, __version__, arguments.group, None, (), arguments.pool)
    loop: WorkerLoop | None = None
    lock: attach.LockFile | None = None
    deadline_ns = _deadline_ns(arguments.wait_s)

    def greet(connection: socket.socket) -> None:
        attach.send_hello(connection, hello)

    while True:
        connection = _connect(path, deadline_ns, loop)
        if connection is None:
            return ExitCode.DONE
        try:
            attach.require_same_user(connection)
            greet(connection)
            answer, descriptors = attach.receive_answer(connection)
        except (ProtocolError, OSError):
            # A gateway that is stopping closes the connection; its successor will answer.
            _disconnect(connection, deadline_ns)
            continue
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the gateway rejected this worker: {answer.message}")
        if loop is None:
            notices = pin_process(answer.cpus, answer.node)
            Path("/proc/self/comm").write_text(f"isk-worker-{answer.index}")
            from iskander_worker import backends
            from iskander_worker.attachments import Attachment, Attachments
            from iskander_worker.loop import WorkerLoop

            backends.has_one_pool = answer.has_one_pool
            backends.gateway_id = gateway_id(Path(path).resolve().parent)
            loop = WorkerLoop(answer.cores)
        elif hello.cpus != answer.cpus:
            log.worker_cores_changed()
            return ExitCode.DONE
        if lock is None or answer.index != hello.index:
            # Also held without a gateway: it shows the next gateway that this process runs.
            if lock is not None:
                lock.release()
            lock = attach.LockFile(Path(path).resolve().parent / f"worker-{answer.index}.lock")
        hello = Hello(
            PROTOCOL_VERSION, __version__, answer.group, answer.index, answer.cpus, hello.pool
        )
        try:
            first = Attachment(path, connection, answer, descriptors)
        except OSError:
            # A gateway that is stopping has removed the folder of the channel's sockets.
            _disconnect(connection, deadline_ns)
            continue
        # The replaced worker may still hold the lock, so every event loop iteration tries it again.
        must_end = loop.serve(Attachments(first, greet, notices), on_iteration=lock.acquire)
        if must_end:
            if not loop.finish():  # A thread of a load still runs.
                os._exit(ExitCode.DONE)
            return ExitCode.DONE
        deadline_ns = _deadline_ns(answer.reattach_s)
        log.gateway_connection_lost()


def _connect(path: str, deadline_ns: int | None, loop: WorkerLoop | None) -> socket.socket | None:
    """Wait for a gateway; None after a stop signal."""
    while loop is None or not loop.is_leaving:
        try:
            return attach.connect(path, ANSWER_TIMEOUT_S)
        except OSError:
            _require_time(deadline_ns, "listened")
        clock.pause_s(CONNECT_PAUSE_S)
    return None


def _disconnect(connection: socket.socket, deadline_ns: int | None) -> None:
    """Give up a gateway that is stopping, and pause before the next attempt."""
    connection.close()
    _require_time(deadline_ns, "registered this worker")
    clock.pause_s(CONNECT_PAUSE_S)


def _deadline_ns(wait_s: float) -> int | None:
    return clock.now_ns() + int(wait_s * clock.NS_PER_S) if wait_s else None


def _require_time(deadline_ns: int | None, event: str) -> None:
    if deadline_ns is not None and clock.now_ns() > deadline_ns:
        raise NotReady(
            f"timeout: no gateway {event} (limit: --wait-s at the start, later workers.reattach_s)"
        )


if __name__ == "__main__":
    main()
