"""The gateway processes that a worker serves: attached to, listened to in turn, let go.

The first one gave this worker its place, and starts and ends it. Where that one has siblings
(`server.processes`), the worker attaches to each of them too, and comes back to any that was away;
with one gateway alone, waiting for its next frame is one system call.

Runs on: worker main.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import Final

from iskander.clock import NS_PER_MS, NS_PER_S, NS_PER_US, now_ns
from iskander.control import attach
from iskander.control.channel import Channel
from iskander.control.messages import Leaving, Notice, Welcome, encode
from iskander.errors import IskanderError, ProtocolError
from iskander.memory.heartbeat import write_beat
from iskander.memory.segment import Segment
from iskander_worker.cancellation import RunCanceller
from iskander_worker.executor import Executor

BEAT_INTERVAL_S: Final = 0.1
RETRY_NS: Final = 50 * NS_PER_MS
REFUSED_NS: Final = NS_PER_S
"""How long one that plans another place for this worker is left alone."""
ANSWER_NS: Final = 600 * NS_PER_S
"""For one to answer: it makes memory first, at a second or two for a GiB. One that has gone hangs
up."""


class Attachment:
    """One gateway process: its socket, its memory, and what runs there.

    Args:
        path: Its attach socket.
        connection: On which it said welcome; owned from here on.
        welcome: What it said.
        descriptors: What came with it; owned from here on.

    Attributes:
        is_told: It knows that this worker wants to leave.
        last_run: Model, rows and nanoseconds of the last batch.
    """

    def __init__(
        self, path: str, connection: socket.socket, welcome: Welcome, descriptors: list[int]
    ) -> None:
        self.path = path
        self.welcome = welcome
        *segment_fds, abort_fd = descriptors
        lengths = (welcome.input_bytes, welcome.output_bytes, welcome.beat_bytes)
        self._segments: list[Segment] = []
        try:
            for length in lengths:
                is_writable = bool(self._segments)  # All but the first, which holds the inputs.
                self._segments.append(
                    Segment.attach(segment_fds.pop(0), length, is_writable=is_writable)
                )
        except BaseException:
            for segment in self._segments:
                segment.close()
            for fd in (*segment_fds, abort_fd):
                os.close(fd)
            raise
        inputs, outputs, beat = self._segments
        self._beat = beat.view
        # One socket is waited on by reading it; of several, only what has come is read.
        self.channel = Channel(connection, None if welcome.siblings else BEAT_INTERVAL_S)
        self.executor = Executor(inputs, outputs)
        self.aborter = RunCanceller(abort_fd)
        self.is_told = False
        self.last_run = (-1, 0, 0)

    def beat(self, at_ns: int, batch_id: int = 0) -> None:
        """Show that this worker turns, and at which batch it is."""
        write_beat(self._beat, at_ns, batch_id)

    def tell_leaving(self) -> None:
        """Ask to be sent nothing more, once."""
        if not self.is_told:
            self.is_told = True
            self.channel.send(encode([Leaving()]))

    def close(self, *, is_open_until_exit: bool) -> None:
        """Unmap, and hang up: now, or with the end of this process, which it then means."""
        if is_open_until_exit:
            self.channel.leave_open()
        else:
            self.channel.close()
        self.executor.forget()
        for segment in self._segments:
            segment.close()


class Attachments:
    """All that this worker is attached to.

    Args:
        first: The one that gave it its place.
        greet: Says hello on a connection to another one.
        notices: What was refused of the plan, for each gateway to know.

    Attributes:
        attached: Those that are there.
        is_moved: One of them wants this worker elsewhere: it makes room for a fresh one.
    """

    def __init__(
        self,
        first: Attachment,
        greet: Callable[[socket.socket], None],
        notices: Sequence[str],
    ) -> None:
        self._first = first
        self._greet = greet
        self._notices = notices
        self._siblings = first.welcome.siblings
        self._busy_poll_ns = first.welcome.busy_poll_us * NS_PER_US
        self._has_run = False
        self._asked: dict[str, tuple[int, socket.socket]] = {}
        self._refused_ns: dict[str, int] = {}
        self._poll = select.poll()
        self._next_look_ns = 0
        self.attached: list[Attachment] = []
        self.is_moved = False
        self._add(first)

    def next(self, wake_fd: int | None = None) -> list[Attachment]:
        """Those to be read: all that have something, or after a while those that are there.

        Args:
            wake_fd: Ends the wait, too.
        """
        if self._has_run:
            self._has_run = False
            self._look_busily()
        if not self._siblings and wake_fd is None:
            return self.attached
        if wake_fd is not None:
            self._poll.register(wake_fd, select.POLLIN)
        ready = {fd for fd, _ in self._poll.poll(BEAT_INTERVAL_S * 1000)}
        if wake_fd is not None:
            self._poll.unregister(wake_fd)
        return [each for each in self.attached if each.channel.fileno() in ready]

    def _look_busily(self) -> None:
        """Wait for a message without sleeping, for a while; others that want the core have it."""
        until_ns = now_ns() + self._busy_poll_ns
        while not self._poll.poll(0) and now_ns() < until_ns:
            os.sched_yield()

    def beat(self, own: Attachment | None = None, batch_id: int = 0, model: int = 0) -> None:
        """Write a heartbeat for all of them.

        Args:
            own: Whose batch is begun now.
            batch_id: Of that batch.
            model: Key of its model; the other gateways see the model's digest.
        """
        at_ns = now_ns()
        if own is not None and self._busy_poll_ns:
            self._has_run = True
        if len(self.attached) == 1:
            self.attached[0].beat(at_ns, batch_id)
            return
        session = own.executor.sessions.get(model) if own is not None else None
        others = -session.digest if session is not None else 0
        for each in self.attached:
            each.beat(at_ns, batch_id if each is own else others)

    def is_first(self, attachment: Attachment) -> bool:
        """Whether it is the one that starts and ends this worker."""
        return attachment.path == self._first.path

    def drop(self, attachment: Attachment, *, is_open_until_exit: bool = False) -> None:
        """Let one go."""
        self.attached.remove(attachment)
        self._poll.unregister(attachment.channel)
        attachment.close(is_open_until_exit=is_open_until_exit)

    def look_for_missing(self) -> None:
        """Attach to those that are not there, without waiting for any of them."""
        now = now_ns()
        if not self._siblings or now < self._next_look_ns:
            return
        self._next_look_ns = now + RETRY_NS
        there = {each.path for each in self.attached}
        for path in (self._first.path, *self._siblings):
            if path in self._asked:
                self._hear(path, now)
            elif path not in there and now >= self._refused_ns.get(path, 0):
                self._ask(path, now)

    def forget_asked(self) -> None:
        """Take no more on."""
        for _, connection in self._asked.values():
            connection.close()
        self._asked.clear()

    def _add(self, attachment: Attachment) -> None:
        self.attached.append(attachment)
        self._poll.register(attachment.channel, select.POLLIN)
        if self._notices:
            attachment.channel.send(encode([Notice(text) for text in self._notices]))

    def _ask(self, path: str, now: int) -> None:
        try:
            connection = attach.connect(path, 0.0)  # It takes this one now, or is asked again.
        except OSError:
            return
        try:
            attach.require_peer(connection)
            self._greet(connection)
        except (IskanderError, OSError):
            connection.close()
            return
        self._asked[path] = (now + ANSWER_NS, connection)

    def _hear(self, path: str, now: int) -> None:
        """Take the answer of one that was asked, where it has come."""
        until_ns, connection = self._asked[path]
        if not select.select([connection], [], [], 0)[0]:
            if now > until_ns:
                del self._asked[path]
                self._refused_ns[path] = now + REFUSED_NS
                connection.close()
            return
        del self._asked[path]
        self._refused_ns[path] = now + REFUSED_NS
        with contextlib.suppress(IskanderError, OSError):
            answer, descriptors = attach.receive_answer(connection)
            if isinstance(answer, Welcome):
                attachment = Attachment(path, connection, answer, descriptors)
                if self._is_at_home(answer):
                    return self._add(attachment)
                attachment.close(is_open_until_exit=False)
            elif answer.code != ProtocolError.code:
                return connection.close()  # It has not the memory now.
            # Planned elsewhere, or the place was filled meanwhile; others only wait for that one.
            self.is_moved |= path == self._first.path
        return connection.close()

    def _is_at_home(self, welcome: Welcome) -> bool:
        """Whether a gateway plans the place for this worker that it has."""
        first = self._first.welcome
        return (welcome.index, welcome.cpus) == (first.index, first.cpus)
