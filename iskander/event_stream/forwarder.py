"""Forwarder of the event streams of several gateway processes to one address.

Runs on: a thread of the parent, in ZeroMQ without the interpreter lock.

Source: zmq_proxy(3), zmq_ctx_term(3).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import zmq

from iskander.config.schema import Config
from iskander.event_stream.endpoint import FORWARDER_SOCKET, IPC, LINGER_MS, Endpoint


class Forwarder:
    """XSUB socket for the processes, XPUB socket for the subscribers; raises ConfigError.

    Attributes:
        address: Actual address for subscribers.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self._endpoint = Endpoint(config)
        self._context: Any = zmq.Context(io_threads=1)
        self._inner: Any = self._context.socket(zmq.XSUB)
        self._outer: Any = self._context.socket(zmq.XPUB)
        self._outer.sndhwm, self._outer.linger = config.events.subscriber_messages, LINGER_MS
        try:
            self._inner.bind(f"{IPC}{folder / FORWARDER_SOCKET}")
            self.address = self._endpoint.bind(self._outer)
        except BaseException:
            self._context.destroy(0)
            self._endpoint.release()
            raise
        self._thread = threading.Thread(target=self._run, name="isk-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and remove the sockets."""
        self._context.term()  # Ends the proxy.
        self._thread.join()
        self._endpoint.release()

    def _run(self) -> None:
        try:
            zmq.proxy(self._inner, self._outer)
        except zmq.ContextTerminated:
            pass
        finally:
            self._inner.close()
            self._outer.close()
