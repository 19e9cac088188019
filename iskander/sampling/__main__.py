"""`python -m iskander.sampling`: observes the sampled requests of one gateway process.

Its standard input is the socket to the gateway. It ends when the gateway closes the socket.

Runs on: the observer process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Final

import pyarrow as pa

from iskander.arrow.without_pandas import keep_pandas_out
from iskander.errors import ConfigError
from iskander.foundation.exit_codes import ExitCode
from iskander.foundation.logs import observation as log
from iskander.foundation.logs.stderr import log_uncaught, set_up
from iskander.sampling.consumers import create_consumers
from iskander.sampling.loop import ObserverLoop, SampledModels, receive_start

NICE: Final = 10
THREADS: Final = 2
"""Threads that encode columns."""


def main() -> int:
    """Entry point of the process; returns its exit code."""
    Path("/proc/self/comm").write_text("isk-observer")
    # Service managers signal all processes; the gateway's end of the socket ends this one.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # On all cpus, not only those of the gateway, with a lower priority than the workers.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.nice(NICE)
    keep_pandas_out()
    threading.excepthook = _end_process
    pa.set_cpu_count(THREADS)
    pa.set_io_thread_count(THREADS)
    connection = socket.socket(fileno=0)
    start = receive_start(connection)
    if start is None:
        return int(ExitCode.DONE)
    config = start.config
    set_up(config.admin.log_format, process=start.process, tag="observer")
    logging.getLogger().setLevel(config.admin.log_level.upper())
    log_uncaught()
    models = SampledModels()
    try:
        consumers = create_consumers(config, models)
    except (ConfigError, OSError) as error:
        log.observer_refused(reason=str(error))
        return int(ExitCode.CONFIG)
    ObserverLoop(connection, config.observation, models, consumers).run()
    return int(ExitCode.DONE)


def _end_process(failure: threading.ExceptHookArgs) -> None:
    """End the process with a thread of a consumer, which would stay without it; it is restarted."""
    threading.__excepthook__(failure)
    sys.stderr.flush()
    os._exit(ExitCode.BUG)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    # `sys.exit` would wait for an upload that hangs.
    os._exit(code)
