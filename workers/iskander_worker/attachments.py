"""Connections of a worker to the gateway processes that it serves.

The first gateway process assigned this worker's slot, and starts and stops it. If that process has
peers (`server.processes`), the worker attaches to each of them too, and reattaches after a restart.
With one gateway process, waiting for its next frame is one system call.

Runs on: worker main.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import Final

from iskander.errors import IskanderError, ProtocolError
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, NS_PER_US, now_ns
from iskander.interprocess.control import attach
from iskander.interprocess.control.attach import open_channel
from iskander.interprocess.control.messages import Leaving, Notice, Welcome, encode
from iskander.interprocess.memory.heartbeat import write_heartbeat
from iskander.interprocess.memory.segment import Segment
from iskander_worker.cancellation import RunCanceller
from iskander_worker.executor import Executor

HEARTBEAT_INTERVAL_S: Final = 0.1
RETRY_NS: Final = 50 * NS_PER_MS
REJECTED_NS: Final = NS_PER_S
"""Retry delay after a gateway process rejected this worker or assigned it another slot."""
ANSWER_NS: Final = 600 * NS_PER_S
"""Handshake timeout; the gateway allocates memory first, at a second or two for a GiB."""


class Attachment:
    """One gateway process: its channel, its segments, and the executor on them.

    Owns: the connection and the descriptors of the `Welcome`.
    """

    def __init__(
        self, path: str, connection: socket.socket, welcome: Welcome, descriptors: list[int]
    ) -> None:
        self.path = path
        self.welcome = welcome
        *segment_fds, abort_fd = descriptors
        lengths = (welcome.input_bytes, welcome.output_bytes, welcome.heartbeat_bytes)
        self._segments: list[Segment] = []
        try:
            for length in lengths:
                # The first segment is the input arena, which is read-only; the others are writable.
                fd, is_writable = segment_fds.pop(0), bool(self._segments)
                self._segments.append(Segment.attach(fd, length, is_writable=is_writable))
            # The read of a single channel waits; several channels are polled before a read.
            wait_s = None if welcome.peers else HEARTBEAT_INTERVAL_S
            self.channel = open_channel(
                connection, welcome.channel, is_gateway=False, wait_s=wait_s
            )
        except BaseException:
            for segment in self._segments:
                segment.close()
            for fd in (*segment_fds, abort_fd):
                os.close(fd)
            raise
        inputs, outputs, heartbeats = self._segments
        self._heartbeat_view = heartbeats.view
        self.executor = Executor(inputs, outputs)
        self.canceller = RunCanceller(abort_fd)
        self._has_sent_leaving = False
        self.last_run = (-1, 0, 0)  # Model, rows and nanoseconds.

    def heartbeat(self, at_ns: int, batch_id: int = 0) -> None:
        """Write the time of this event loop iteration, and the running batch."""
        write_heartbeat(self._heartbeat_view, at_ns, batch_id)

    def send_leaving(self) -> None:
        """Ask for no more work, once."""
        if not self._has_sent_leaving:
            self._has_sent_leaving = True
            self.channel.send(encode([Leaving()]))

    def close(self, *, is_open_until_exit: bool) -> None:
        """Unmap the segments, and close the channel: now, or by the exit of this process."""
        if is_open_until_exit:
            self.channel.leave_open()
        else:
            self.channel.close()
        self.executor.clear()
        for segment in self._segments:
            segment.close()


class Attachments:
    """All gateway processes that this worker serves.

    `first` assigned the slot; `greet` sends `Hello` to a peer. `is_reassigned` is set when the
    first process assigns another slot or other cores, so that this worker exits.
    """

    def __init__(
        self, first: Attachment, greet: Callable[[socket.socket], None], notices: Sequence[str]
    ) -> None:
        self._first = first
        self._greet = greet
        self._notices = notices
        self._peers = first.welcome.peers
        self._busy_poll_ns = first.welcome.busy_poll_us * NS_PER_US
        self._has_run = False
        self._handshakes: dict[str, tuple[int, socket.socket]] = {}
        self._retry_at_ns: dict[str, int] = {}
        self._poll = select.poll()
        self._next_attach_ns = 0
        self.attached: list[Attachment] = []
        self.is_reassigned = False
        self._add(first)

    def wait(self, wake_fds: tuple[int, ...] = ()) -> list[Attachment]:
        """Wait until a channel or one of `wake_fds` is readable; return the readable attachments.

        Returns after a heartbeat interval at the latest. With a single channel and no `wake_fds` it
        returns at once, because the read of that channel waits.
        """
        for fd in wake_fds:
            self._poll.register(fd, select.POLLIN)
        if self._has_run:
            self._has_run = False
            self._busy_poll()
        if not self._peers and not wake_fds:
            return self.attached
        ready = {fd for fd, _ in self._poll.poll(HEARTBEAT_INTERVAL_S * 1000)}
        for fd in wake_fds:
            self._poll.unregister(fd)
        return [attachment for attachment in self.attached if attachment.channel.fileno() in ready]

    def _busy_poll(self) -> None:
        """Poll for a message without sleeping, for a limited time; yield the core meanwhile."""
        until_ns = now_ns() + self._busy_poll_ns
        while not self._poll.poll(0) and now_ns() < until_ns:
            os.sched_yield()

    def heartbeat(self, own: Attachment | None = None, batch_id: int = 0, model: int = 0) -> None:
        """Write a heartbeat for every gateway process.

        `own` is the process whose batch starts; None without a batch. It receives the batch id. The
        other processes receive the negative digest of the model with the key `model`.
        """
        at_ns = now_ns()
        if own is not None and self._busy_poll_ns:
            self._has_run = True
        if len(self.attached) == 1:
            self.attached[0].heartbeat(at_ns, batch_id)
            return
        session = own.executor.sessions.get(model) if own is not None else None
        busy_with = -session.digest if session is not None else 0
        for attachment in self.attached:
            attachment.heartbeat(at_ns, batch_id if attachment is own else busy_with)

    def is_first(self, attachment: Attachment) -> bool:
        """Whether this attachment is that of the process that starts and stops this worker."""
        return attachment.path == self._first.path

    def drop(self, attachment: Attachment, *, is_open_until_exit: bool = False) -> None:
        """Detach from a gateway process."""
        self.attached.remove(attachment)
        self._poll.unregister(attachment.channel)
        attachment.close(is_open_until_exit=is_open_until_exit)

    def attach_missing(self) -> None:
        """Advance the handshakes with missing gateway processes, without blocking."""
        now = now_ns()
        if not self._peers or now < self._next_attach_ns:
            return
        self._next_attach_ns = now + RETRY_NS
        attached = {attachment.path for attachment in self.attached}
        for path in (self._first.path, *self._peers):
            if path in self._handshakes:
                self._finish_handshake(path, now)
            elif path not in attached and now >= self._retry_at_ns.get(path, 0):
                self._start_handshake(path, now)

    def abort_handshakes(self) -> None:
        """Close the connections of unfinished handshakes."""
        for _, connection in self._handshakes.values():
            connection.close()
        self._handshakes.clear()

    def _add(self, attachment: Attachment) -> None:
        self.attached.append(attachment)
        self._poll.register(attachment.channel, select.POLLIN)
        if self._notices:
            attachment.channel.send(encode([Notice(text) for text in self._notices]))

    def _start_handshake(self, path: str, now: int) -> None:
        try:
            connection = attach.connect(path, 0.0)  # Raises if it would block.
        except OSError:
            return
        try:
            attach.require_same_user(connection)
            self._greet(connection)
        except (IskanderError, OSError):
            connection.close()
            return
        self._handshakes[path] = (now + ANSWER_NS, connection)

    def _finish_handshake(self, path: str, now: int) -> None:
        """Read the answer of a gateway process, if it has arrived, and attach."""
        until_ns, connection = self._handshakes[path]
        has_answer = bool(select.select([connection], [], [], 0)[0])
        if not has_answer and now <= until_ns:
            return
        del self._handshakes[path]
        self._retry_at_ns[path] = now + REJECTED_NS
        if not has_answer:
            return connection.close()
        with contextlib.suppress(IskanderError, OSError):
            answer, descriptors = attach.receive_answer(connection)
            if isinstance(answer, Welcome):
                attachment = Attachment(path, connection, answer, descriptors)
                first = self._first.welcome
                if (answer.index, answer.cpus) == (first.index, first.cpus):
                    return self._add(attachment)
                attachment.close(is_open_until_exit=False)
            elif answer.code != ProtocolError.code:
                return connection.close()  # No memory in the gateway process: tried again later.
            # This worker's slot is occupied, or it got another one. Only the first process ends it.
            self.is_reassigned |= path == self._first.path
        return connection.close()
