"""`iskander-worker`: attach to a gateway, take a place on the cores, load models, run batches.

The order matters and is the reason for the late imports: who this worker is comes over the
attach socket first, then the process is pinned, and only then are NumPy and ONNX Runtime
imported, so that every thread and page of theirs is born on the right cores.

Exit codes: 0 drained; 2 wrong usage; 69 no gateway; 70 a bug; 71 the system refused memory;
76 the gateway speaks another version or does not want this worker.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from iskander import __version__, clock
from iskander.control import attach
from iskander.control.messages import PROTOCOL_VERSION, Hello, Welcome
from iskander.errors import NotReady, ProtocolError, SegmentError
from iskander_worker.affinity import pin_process, set_library_environment

if TYPE_CHECKING:
    from iskander_worker.loop import WorkerLoop

EXIT_DRAINED, EXIT_NO_GATEWAY, EXIT_BUG, EXIT_MEMORY, EXIT_REFUSED = 0, 69, 70, 71, 76
CONNECT_PAUSE_S = 0.05
ANSWER_TIMEOUT_S = 600.0
"""For the gateway to answer: it makes this worker's memory first, at a second or two for a GiB. One
that has gone hangs up."""
SWITCH_S = 0.0002
"""How soon the working thread gets the interpreter back from the loading one; by default 5 ms,
which a batch would wait, and so would who starts a thread until that has begun."""


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(
        prog="iskander-worker",
        description="Run models for an iskander-gateway: attach to its socket, pin this process "
        "to the cores that the gateway assigns, load the models and compute batches.",
        epilog="Stop it with SIGTERM: it finishes its batches and exits 0. When the gateway dies "
        "it keeps its models and waits for the next one; one that stops ends it.",
    )
    parser.add_argument(
        "--attach",
        metavar="SOCKET",
        help="the gateway's attach socket: RUNTIME_DIRECTORY/attach.sock",
    )
    parser.add_argument("--try", type=int, dest="cores", help=argparse.SUPPRESS)
    parser.add_argument(
        "--group", type=int, metavar="N", help="the core group to serve in (default: any)"
    )
    parser.add_argument(
        "--pool",
        default="",
        metavar="NAME/VERSION",
        help="the one model to serve, where it has workers of its own (default: all others)",
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for the first gateway; 0 for ever (default: 30)",
    )
    parser.add_argument("--version", action="version", version=f"iskander-worker {__version__}")
    arguments = parser.parse_args()
    if arguments.cores is not None:
        set_library_environment()
        from iskander_worker.sandbox.check import try_model

        return try_model(arguments.cores)
    if arguments.attach is None:
        parser.error("the following arguments are required: --attach")
    # Until the loop has handlers of its own there is nothing to finish.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_DRAINED))
    try:
        sys.exit(_work(arguments))
    except SegmentError as error:
        _say(error.message)
        sys.exit(EXIT_MEMORY)
    except ProtocolError as error:
        _say(error.message)
        sys.exit(EXIT_REFUSED)
    except NotReady as error:
        _say(error.message)
        sys.exit(EXIT_NO_GATEWAY)
    except AssertionError as error:
        _say(f"bug: {error}")
        sys.exit(EXIT_BUG)


def _work(arguments: argparse.Namespace) -> int:
    set_library_environment()
    sys.setswitchinterval(SWITCH_S)
    path, group, pool = arguments.attach, arguments.group, arguments.pool
    index: int | None = None
    cpus: tuple[int, ...] = ()
    loop: WorkerLoop | None = None
    lock: attach.LockFile | None = None
    deadline_ns = _deadline_ns(arguments.wait_s)

    def greet(connection: socket.socket) -> None:
        attach.send_hello(
            connection, Hello(PROTOCOL_VERSION, __version__, group, index, cpus, pool)
        )

    while True:
        connection = _connect(path, deadline_ns, loop)
        if connection is None:
            return EXIT_DRAINED
        try:
            attach.require_peer(connection)
            greet(connection)
            answer, descriptors = attach.receive_answer(connection)
        except (ProtocolError, OSError):
            # A gateway that stops just now hangs up; the next one will answer.
            connection.close()
            _require_time(deadline_ns, "took this worker on")
            clock.pause_s(CONNECT_PAUSE_S)
            continue
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the gateway refused this worker: {answer.message}")
        if loop is None:
            cpus = answer.cpus
            notices = pin_process(cpus, answer.node)
            _name_process(f"isk-worker-{answer.index}")
            from iskander_worker import backends
            from iskander_worker.attachments import Attachment, Attachments
            from iskander_worker.loop import WorkerLoop

            backends.threads.is_one_pool = answer.has_one_pool
            loop = WorkerLoop(answer.cores)
        elif cpus != answer.cpus:
            _say("the new gateway plans other cores for this worker; it makes room for a fresh one")
            return EXIT_DRAINED
        if answer.index != index:
            # Held while there is no gateway too: the next one sees by it that this process lives.
            if lock is not None:
                lock.release()
            lock = attach.LockFile(Path(path).resolve().parent / f"worker-{answer.index}.lock")
        index, group = answer.index, answer.group
        assert lock is not None
        # The worker that it replaces may hold the lock for a moment more: tried at every turn.
        first = Attachment(path, connection, answer, descriptors)
        if loop.serve(Attachments(first, greet, notices), on_turn=lock.take):
            if not loop.finish():
                os._exit(EXIT_DRAINED)
            return EXIT_DRAINED
        deadline_ns = _deadline_ns(answer.reattach_s)
        _say("the gateway is gone; keeping the models and waiting for the next one")


def _connect(path: str, deadline_ns: int | None, loop: WorkerLoop | None) -> socket.socket | None:
    """Wait for a gateway; None where this worker was asked to stop meanwhile."""
    while loop is None or not loop.is_leaving:
        try:
            return attach.connect(path, ANSWER_TIMEOUT_S)
        except OSError:
            _require_time(deadline_ns, "listened")
        clock.pause_s(CONNECT_PAUSE_S)
    return None


def _deadline_ns(wait_s: float) -> int | None:
    return clock.now_ns() + int(wait_s * clock.NS_PER_S) if wait_s else None


def _require_time(deadline_ns: int | None, what: str) -> None:
    if deadline_ns is not None and clock.now_ns() > deadline_ns:
        raise NotReady(f"no gateway {what} within the time to wait")


def _name_process(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


def _say(text: str) -> None:
    sys.stderr.write(f"iskander-worker[{os.getpid()}]: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
