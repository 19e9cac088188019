"""Client of complete calls: HTTP/2 with flow control (h2), gRPC messages by hand."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from benchmarks.hostile import wire
from benchmarks.hostile.attack import Attack

BUFFER_BYTES = 1 << 20
READ_BYTES = 1 << 18
MESSAGE_CHARACTERS = 300
PREFIX = struct.Struct("!BI")


class _Call:
    """One call: its unsent message, and the responses so far."""

    def __init__(self, number: int, messages: list[bytes]) -> None:
        self.number = number
        self.messages = [wire.message(each) for each in reversed(messages)]
        self.unsent = memoryview(b"")
        self.repeated = self.responses = 0
        self.is_ended = False
        self._rest = 0
        self._prefix = b""

    def count(self, raw: bytes) -> None:
        """Count the messages that begin in received bytes."""
        at = 0
        while at < len(raw):
            skipped = min(self._rest, len(raw) - at)
            at, self._rest = at + skipped, self._rest - skipped
            taken = raw[at : at + PREFIX.size - len(self._prefix)]
            if self._rest or not taken:
                return
            at += len(taken)
            self._prefix += taken
            if len(self._prefix) == PREFIX.size:
                _, self._rest = PREFIX.unpack(self._prefix)
                self._prefix = b""
                self.responses += 1


class CallConnection:
    """A connection with calls; has the interface of `attacker.Connection`.

    Attributes:
        statuses: Number of ended calls by gRPC status.
        message: Of the first status other than 0.
    """

    def __init__(self, attack: Attack, connection: socket.socket, port: int) -> None:
        assert attack.calls is not None
        self.attack = attack
        self.socket = connection
        self.is_over = False
        self.end = ""
        self.sent = 0
        self.statuses: Counter[str] = Counter()
        self.message = ""
        self._calls = attack.calls
        self._open: dict[int, _Call] = {}
        self._number = 0
        self._unsent = memoryview(b"")
        config = h2.config.H2Configuration(header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(config)
        self._h2.initiate_connection()
        window = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: self._calls.window}
        self._h2.update_settings(window)
        if self._calls.window:
            self._h2.increment_flow_control_window((1 << 30) - 65_535)
        prepare = self._calls.first_message
        self._prepared = [] if prepare is None else [prepare(port)]

    @property
    def has_output(self) -> bool:
        """Whether there are bytes to send now."""
        if not self._unsent and not self.is_over:
            self._advance()
            self._unsent = memoryview(self._h2.data_to_send())
        return bool(self._unsent)

    def send(self) -> None:
        """Send as many bytes as the socket accepts."""
        try:
            sent = self.socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self._close("reset")
            return
        self.sent += sent
        self._unsent = self._unsent[sent:]

    def read(self) -> None:
        """Read, and process the events."""
        try:
            raw = self.socket.recv(READ_BYTES)
            events = self._h2.receive_data(raw) if raw else []
        except BlockingIOError:
            return
        except OSError:
            self._close("reset")
            return
        except h2.exceptions.ProtocolError:
            self._close("protocol error")
            return
        if not raw:
            self._close("closed")
            return
        for event in events:
            self._on_event(event)

    def _on_event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self.message = (
                self.message or (event.additional_data or b"").decode()[:MESSAGE_CHARACTERS]
            )
            self._close(f"GOAWAY {int(event.error_code or 0)}")
            return
        call = self._open.get(getattr(event, "stream_id", None) or 0)
        if call is None:
            return
        if isinstance(event, h2.events.DataReceived):
            call.count(event.data)
            if self._calls.window:
                size = event.flow_controlled_length or 0
                self._h2.acknowledge_received_data(size, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
            headers = dict(event.headers or [])
            if status := headers.get("grpc-status"):
                self.statuses[status] += 1
                if status != "0" and not self.message:
                    self.message = headers.get("grpc-message", "")[:MESSAGE_CHARACTERS]
                self._end(event.stream_id, call)
        elif isinstance(event, h2.events.StreamReset):
            self.statuses["reset"] += 1
            del self._open[event.stream_id]

    def _end(self, stream_id: int, call: _Call) -> None:
        del self._open[stream_id]
        if not call.is_ended:
            with contextlib.suppress(h2.exceptions.StreamClosedError):
                self._h2.reset_stream(stream_id)

    def _advance(self) -> None:
        """Open calls, and write the next messages, within flow control and a buffer."""
        calls, buffered = self._calls, 0
        while len(self._open) < calls.concurrent and self._number < calls.total:
            stream_id = self._h2.get_next_available_stream_id()
            limit = self._h2.remote_settings.max_concurrent_streams
            if limit <= len(self._open):
                break
            self._h2.send_headers(stream_id, wire.request_fields(calls.path))
            messages = [*calls.opening(self._number), *self._prepared]
            self._open[stream_id] = _Call(self._number, messages)
            self._number += 1
        for stream_id, call in list(self._open.items()):
            if buffered > BUFFER_BYTES:
                return
            while not call.is_ended and (call.unsent or self._next_message(call)):
                size = min(
                    self._h2.local_flow_control_window(stream_id),
                    self._h2.max_outbound_frame_size,
                    len(call.unsent),
                    BUFFER_BYTES,
                )
                if size <= 0 or buffered > BUFFER_BYTES:
                    break
                self._h2.send_data(stream_id, call.unsent[:size].tobytes())
                call.unsent = call.unsent[size:]
                buffered += size
            if not call.is_ended and not call.unsent and self._is_complete(call):
                self._h2.end_stream(stream_id)
                call.is_ended = True

    def _next_message(self, call: _Call) -> bool:
        """Take the next message of a call, if it may be sent now."""
        calls = self._calls
        if call.messages:
            call.unsent = memoryview(call.messages.pop())
            return True
        if calls.repeated is None or call.repeated >= calls.repeats:
            return False
        # The first response is that to the opening.
        if call.responses <= call.repeated - calls.ahead + 1:
            return False
        call.unsent = memoryview(wire.message(calls.repeated(call.number, call.repeated)))
        call.repeated += 1
        return True

    def _is_complete(self, call: _Call) -> bool:
        """Whether a call has no more messages and does not stay open."""
        calls = self._calls
        if calls.is_held or call.messages:
            return False
        return calls.repeated is None or call.repeated >= calls.repeats

    def _close(self, cause: str) -> None:
        self.is_over = True
        self.end = cause
        self.socket.close()
