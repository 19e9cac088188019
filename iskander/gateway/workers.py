"""What the gateway holds of one worker: its place, its memory, its socket and what it runs.

Runs on: gateway loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec

from iskander.gateway.lanes import Request
from iskander.gateway.lifecycle import Event, State
from iskander.memory.arena import Arena, Lease
from iskander.memory.beat import BEAT_BYTES, Beat, read_beat
from iskander.memory.segment import Segment
from iskander.wire.channel import Sender

CREDITS = 2
"""One batch running and one waiting, so that a worker never idles between two."""

STORY_LENGTH = 32


class Flight(NamedTuple):
    """A batch that a worker has."""

    request: Request
    output: Lease
    output_bytes: int
    sent_ns: int


class Place(msgspec.Struct, frozen=True):
    """Where a worker of the plan runs."""

    index: int
    group: int
    cpus: tuple[int, ...]
    node: int | None


class Worker:
    """A place of the plan, and the process that fills it now.

    Attributes:
        incarnation: Of the attached process; 0 while there is none.
        credits: How many more batches may be sent to it.
        child: The process, where this gateway started it and has not seen its end.
        in_flight: What it has, by batch id.
        models: Keys of the models that it has loaded.
        story: The last events, for the operator.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.state = State.ABSENT
        self.incarnation = 0
        self.pid = 0
        self.credits = 0
        self.in_flight: dict[int, Flight] = {}
        self.models: set[int] = set()
        self.batches = 0
        self.starts = 0
        self.failures = 0
        self.has_been_ready = False
        self.opened_ns = 0
        self.story: deque[tuple[int, Event, State]] = deque(maxlen=STORY_LENGTH)
        self.child: subprocess.Popen[bytes] | None = None
        self.connection: socket.socket | None = None
        self.sender: Sender | None = None
        self.output: Segment | None = None
        self.output_arena = Arena(0)
        self.beat: Segment | None = None
        self._pidfd: int | None = None

    def __repr__(self) -> str:
        return (
            f"<Worker {self.place.index} {self.state} incarnation {self.incarnation} "
            f"pid {self.pid}, {len(self.in_flight)} in flight>"
        )

    def spawn(self, attach_socket: Path) -> tuple[subprocess.Popen[bytes], int]:
        """Start a process for this place; the caller owns the pidfd.

        Raises:
            OSError: The system refused it.
        """
        self.starts += 1
        command = [sys.executable, "-m", "iskander_worker"]
        command += ["--attach", str(attach_socket), "--group", str(self.place.group)]
        environment = dict(os.environ, PYTHONFAULTHANDLER="1")
        environment.pop("NOTIFY_SOCKET", None)
        # A session of its own: a Ctrl-C at the terminal is for the gateway, which drains.
        self.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
        return self.child, os.pidfd_open(self.child.pid)

    def attach(self, incarnation: int, pid: int, output_bytes: int) -> None:
        """Take on a process: memory of its own, made on its node."""
        index = self.place.index
        self.output = Segment.create(f"iskander-output-{index}", output_bytes, node=self.place.node)
        self.beat = Segment.create(f"iskander-beat-{index}", BEAT_BYTES)
        self.output_arena = Arena(output_bytes)
        self.incarnation = incarnation
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.models = set()
        self.credits = CREDITS

    def detach(self) -> None:
        """Let go of a process that is gone: its memory, sockets and descriptors."""
        self.incarnation = self.pid = self.credits = 0
        self.models = set()
        self.output_arena = Arena(0)
        for part in (self.sender, self.output, self.beat, self.connection):
            if part is not None:
                part.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self.sender = self.output = self.beat = self.connection = self._pidfd = None

    def kill(self) -> None:
        """End the process now, by a descriptor or child that can mean no other."""
        if self.child is not None:
            self.child.kill()
        elif self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def last_beat(self) -> Beat:
        """The worker's sign of progress."""
        return read_beat(self.beat.view) if self.beat is not None else Beat(0, 0)
