"""Process that runs one attack: `python -m benchmarks.hostile.attacker NAME PLACE SECONDS`.

PLACE is a port, or the path of a socket. The attack starts after a line on standard input, from
another address than that of the innocent client. A connection that the server closes is opened
again. Prints one line of JSON: connections, sent bytes, the ends of connections by GOAWAY code or
socket error, and the ends of calls by gRPC status.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections import Counter

from benchmarks.hostile.attack import Attack
from benchmarks.hostile.attacks import attacks_of
from benchmarks.hostile.call_client import CallConnection

READ_BYTES = 1 << 18
SEND_BYTES = 1 << 18
REOPEN_S = 0.05
"""Delay before a connection that the server closed is opened again."""
SOURCE = "127.0.0.2"
"""Address of the attacker."""
ANSWERED = "answered"
CODES = {1: "PROTOCOL_ERROR", 3: "FLOW_CONTROL_ERROR", 5: "STREAM_CLOSED", 9: "COMPRESSION_ERROR",
         11: "ENHANCE_YOUR_CALM"}  # fmt: skip


class Connection:
    """A connection of an attack.

    Attributes:
        is_over: The server closed it.
        end: Cause of the close.
        sent: Bytes.
    """

    def __init__(self, attack: Attack, connection: socket.socket) -> None:
        self.attack = attack
        self.socket = connection
        self.is_over = False
        self.end = ""
        self.sent = 0
        self.statuses: Counter[str] = Counter()
        self.message = ""
        self._unsent = memoryview(attack.opening())
        self._number = 0
        self._next_s = 0.0
        self._response = b""

    @property
    def has_output(self) -> bool:
        """Whether there are bytes to send now."""
        attack = self.attack
        if self._unsent:
            return True
        has_more = attack.chunk is not None and self._number < attack.repeats
        return has_more and time.monotonic() >= self._next_s

    def send(self) -> None:
        """Send as many bytes as the socket accepts."""
        if not self._unsent:
            assert self.attack.chunk is not None
            self._unsent = memoryview(self.attack.chunk(self._number))
            self._number += 1
            self._next_s = time.monotonic() + self.attack.pause_s
        try:
            sent = self.socket.send(self._unsent[:SEND_BYTES])
        except BlockingIOError:
            return
        except OSError:
            self._close("reset")
            return
        self.sent += sent
        self._unsent = self._unsent[sent:]

    def read(self) -> None:
        """Read, and keep the end of the input for a GOAWAY frame."""
        try:
            raw = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._close("reset")
            return
        if not raw:
            self._close("closed")
        elif self.attack.ends_answered:
            self._close(ANSWERED)
        elif self.attack.listener == "grpc":
            self._response = (self._response + raw)[-READ_BYTES:]

    def _close(self, cause: str) -> None:
        self.is_over = True
        at = self._response.rfind(
            b"\x07\x00\x00\x00\x00\x00"
        )  # Type, flags and stream of a GOAWAY.
        if at >= 0 and len(self._response) >= at + 14:
            code = int.from_bytes(self._response[at + 10 : at + 14])
            cause = CODES.get(code, str(code)) if code else cause
        self.end = cause
        self.socket.close()


def connect(attack: Attack, place: str) -> Connection | CallConnection:
    """Open a connection of an attack."""
    if attack.listener == "memory":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(place)
    else:
        address = ("127.0.0.1", int(place))
        connection = socket.create_connection(address, 5, source_address=(SOURCE, 0))
    connection.setblocking(False)
    if attack.calls is not None:
        return CallConnection(attack, connection, int(place))
    return Connection(attack, connection)


def run_attack(attack: Attack, place: str, seconds: float) -> dict[str, object]:
    """Run an attack; return its counts."""
    ends: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    opened = sent = 0
    message = ""
    until_s = time.monotonic() + seconds
    connections: list[Connection | CallConnection] = []
    reopen_s = 0.0
    with selectors.DefaultSelector() as selector:
        while time.monotonic() < until_s:
            while len(connections) < attack.connections and time.monotonic() >= reopen_s:
                try:
                    connection = connect(attack, place)
                except OSError:
                    ends["refused"] += 1
                    reopen_s = time.monotonic() + REOPEN_S
                    break
                opened += 1
                connections.append(connection)
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            _exchange(selector, connections, attack)
            for connection in [each for each in connections if each.is_over]:
                connections.remove(connection)
                ends[connection.end] += 1
                sent += connection.sent
                statuses += connection.statuses
                message = message or connection.message
                if connection.end != ANSWERED:
                    reopen_s = time.monotonic() + REOPEN_S
        for connection in connections:
            sent += connection.sent
            statuses += connection.statuses
            message = message or connection.message
            ends["still open"] += 1
            connection.socket.close()
    return {
        "attack": attack.name,
        "connections": opened,
        "sent_bytes": sent,
        "ends": dict(ends),
        "statuses": dict(statuses),
        "message": message,
    }


def _exchange(
    selector: selectors.BaseSelector,
    connections: list[Connection | CallConnection],
    attack: Attack,
) -> None:
    """Send and read once on each ready connection."""
    for connection in connections:
        events = selectors.EVENT_READ if attack.reads else 0
        if connection.has_output:
            events |= selectors.EVENT_WRITE
        if not connection.is_over:
            selector.modify(connection.socket, events or selectors.EVENT_WRITE, connection)
    for key, events in selector.select(0.05):
        connection = key.data
        if events & selectors.EVENT_READ:
            connection.read()
        if events & selectors.EVENT_WRITE and not connection.is_over and connection.has_output:
            connection.send()
        if connection.is_over:
            selector.unregister(key.fileobj)
    if not attack.reads and not any(each.has_output for each in connections):
        time.sleep(0.01)


def main() -> None:
    """Run the attack given on the command line."""
    (attack,) = attacks_of(sys.argv[1])
    # Build cached bytes before the attack, so that their CPU time is not part of it.
    attack.opening()
    if attack.chunk is not None:
        attack.chunk(0)
    if attack.calls is not None:
        attack.calls.opening(0)
        if attack.calls.repeated is not None:
            attack.calls.repeated(0, 0)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(run_attack(attack, sys.argv[2], float(sys.argv[3]))))


if __name__ == "__main__":
    main()
