"""Carries one attack out: `python -m benchmarks.hostile.attacker NAME PORT SECONDS`.

It begins when it is sent a line. A connection that the server ends is opened again. Prints one line
of JSON: connections, bytes sent, and how connections ended, by the code of GOAWAY or by what the
socket said.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections import Counter

from benchmarks.hostile.attacks import Attack, of_row

READ_BYTES = 1 << 18
SEND_BYTES = 1 << 18
AGAIN_S = 0.05
"""Before a connection that was ended is opened again."""
CODES = {1: "PROTOCOL_ERROR", 3: "FLOW_CONTROL_ERROR", 5: "STREAM_CLOSED", 9: "COMPRESSION_ERROR",
         11: "ENHANCE_YOUR_CALM"}  # fmt: skip


class Connection:
    """One connection of an attack.

    Attributes:
        is_over: The server has ended it.
        end: How.
        sent: Bytes.
    """

    def __init__(self, attack: Attack, port: int) -> None:
        self.attack = attack
        self.socket = socket.create_connection(("127.0.0.1", port), 5)
        self.socket.setblocking(False)
        self.is_over = False
        self.end = ""
        self.sent = 0
        self._left = memoryview(attack.opening())
        self._number = 0
        self._next_s = 0.0
        self._answer = b""

    @property
    def wants_to_send(self) -> bool:
        """Whether there is something to send now."""
        attack = self.attack
        if self._left:
            return True
        has_more = attack.chunk is not None and self._number < attack.repeats
        return has_more and time.monotonic() >= self._next_s

    def send(self) -> None:
        """Send as much as the socket takes."""
        if not self._left:
            assert self.attack.chunk is not None
            self._left = memoryview(self.attack.chunk(self._number))
            self._number += 1
            self._next_s = time.monotonic() + self.attack.pause_s
        try:
            sent = self.socket.send(self._left[:SEND_BYTES])
        except BlockingIOError:
            return
        except OSError:
            self._finish("reset")
            return
        self.sent += sent
        self._left = self._left[sent:]

    def read(self) -> None:
        """Read what came, and look for a GOAWAY in it."""
        try:
            raw = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._finish("reset")
            return
        if not raw:
            self._finish("closed")
        elif self.attack.door == "grpc":
            self._answer = (self._answer + raw)[-READ_BYTES:]

    def _finish(self, how: str) -> None:
        self.is_over = True
        at = self._answer.rfind(b"\x07\x00\x00\x00\x00\x00")  # Kind, flags and stream of a GOAWAY.
        if at >= 0 and len(self._answer) >= at + 14:
            code = int.from_bytes(self._answer[at + 10 : at + 14])
            how = CODES.get(code, str(code)) if code else how
        self.end = how
        self.socket.close()


def attack_for(attack: Attack, port: int, seconds: float) -> dict[str, object]:
    """Carry an attack out; return what came of it."""
    ends: Counter[str] = Counter()
    opened = sent = 0
    until_s = time.monotonic() + seconds
    open_ones: list[Connection] = []
    again_s = 0.0
    with selectors.DefaultSelector() as selector:
        while time.monotonic() < until_s:
            while len(open_ones) < attack.connections and time.monotonic() >= again_s:
                try:
                    connection = Connection(attack, port)
                except OSError:
                    ends["refused"] += 1
                    again_s = time.monotonic() + AGAIN_S
                    break
                opened += 1
                open_ones.append(connection)
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            _turn(selector, open_ones, attack)
            for connection in [each for each in open_ones if each.is_over]:
                open_ones.remove(connection)
                ends[connection.end] += 1
                sent += connection.sent
                again_s = time.monotonic() + AGAIN_S
        for connection in open_ones:
            sent += connection.sent
            ends["still open"] += 1
            connection.socket.close()
    return {"attack": attack.name, "connections": opened, "sent_bytes": sent, "ends": dict(ends)}


def _turn(selector: selectors.BaseSelector, open_ones: list[Connection], attack: Attack) -> None:
    """Send and read once on each connection that can."""
    for connection in open_ones:
        events = selectors.EVENT_READ if attack.reads else 0
        if connection.wants_to_send:
            events |= selectors.EVENT_WRITE
        if not connection.is_over:
            selector.modify(connection.socket, events or selectors.EVENT_WRITE, connection)
    for key, events in selector.select(0.05):
        connection = key.data
        if events & selectors.EVENT_READ:
            connection.read()
        if events & selectors.EVENT_WRITE and not connection.is_over and connection.wants_to_send:
            connection.send()
        if connection.is_over:
            selector.unregister(key.fileobj)
    if not any(each.wants_to_send for each in open_ones):
        time.sleep(0.01)


def main() -> None:
    """Carry out the attack that the arguments name."""
    (attack,) = of_row(sys.argv[1])
    # What is made once is made before the attack: it would be counted as work of the server.
    attack.opening()
    if attack.chunk is not None:
        attack.chunk(0)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(attack_for(attack, int(sys.argv[2]), float(sys.argv[3]))))


if __name__ == "__main__":
    main()
