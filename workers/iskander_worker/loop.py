"""Receive, run, answer, beat, drain: the worker's one thread, and the only user of its sockets.

Runs on: worker main.
"""

from __future__ import annotations

import os
import signal
import socket

from iskander.clock import NS_PER_MS, now_ns
from iskander.errors import IskanderError
from iskander.memory.beat import write_beat
from iskander.memory.segment import Segment
from iskander.wire.channel import Receiver, Sender, Waiter, open_context
from iskander.wire.messages import (
    Done,
    Drain,
    Execute,
    Failed,
    Leaving,
    Load,
    Loaded,
    LoadFailed,
    ModelSpec,
    Ready,
    Welcome,
    decode_to_worker,
    encode,
)
from iskander_worker.executor import Executor
from iskander_worker.session import Session

BEAT_INTERVAL_MS = 100
DRAIN_LINGER_MS = 1000
WARM_UP_ROWS = 128


class WorkerLoop:
    """Serves one gateway after another, and keeps the models between them.

    Args:
        cores: Cores that this process is pinned to, or 0 for those that it was started on.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores or len(os.sched_getaffinity(0))
        self._sessions: dict[str, Session] = {}
        self._context = open_context()
        self._is_leaving = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def serve(self, connection: socket.socket, welcome: Welcome, descriptors: list[int]) -> bool:
        """Work for one gateway until it drains this worker (True) or is gone (False)."""
        input_fd, output_fd, beat_fd = descriptors
        inputs = Segment.attach(input_fd, welcome.input_bytes, is_writable=False)
        outputs = Segment.attach(output_fd, welcome.output_bytes, is_writable=True)
        beat = Segment.attach(beat_fd, welcome.beat_bytes, is_writable=True)
        receiver = Receiver(self._context, welcome.work_address.removeprefix("ipc://"))
        sender = Sender(self._context, welcome.results_address)
        executor = Executor(inputs, outputs)
        linger_ms = 0
        try:
            sender.send(encode(Ready(welcome.incarnation)))
            is_drained = self._turn(connection, welcome, receiver, sender, executor, beat.view)
            linger_ms = DRAIN_LINGER_MS if is_drained else 0
            return is_drained
        finally:
            executor.forget()
            sender.close(linger_ms=linger_ms)
            receiver.close()
            for segment in (inputs, outputs, beat):
                segment.close()

    def _turn(
        self,
        connection: socket.socket,
        welcome: Welcome,
        receiver: Receiver,
        sender: Sender,
        executor: Executor,
        beat: memoryview,
    ) -> bool:
        incarnation = welcome.incarnation
        waiter = Waiter(receiver, connection.fileno())
        has_said_leaving = False
        while True:
            write_beat(beat, now_ns(), 0)
            for frame in receiver.receive_waiting():
                message = decode_to_worker(frame)
                if isinstance(message, Execute):
                    write_beat(beat, now_ns(), message.batch_id)
                    sender.send(self._execute(message, incarnation, executor))
                    write_beat(beat, now_ns(), 0)
                elif isinstance(message, Load):
                    sender.send(self._load(message.model, incarnation, executor))
                else:
                    assert isinstance(message, Drain)
                    return True
            if self._is_leaving and not has_said_leaving:
                sender.send(encode(Leaving(incarnation)))
                has_said_leaving = True
            if waiter.wait(BEAT_INTERVAL_MS):
                return self._is_leaving

    @staticmethod
    def _execute(message: Execute, incarnation: int, executor: Executor) -> bytes:
        # Step 6
        begun_ns = now_ns()
        try:
            executor.execute(message)
        except IskanderError as error:
            return encode(Failed(incarnation, message.batch_id, error.code, error.message))
        return encode(Done(incarnation, message.batch_id, now_ns() - begun_ns))

    def _load(self, spec: ModelSpec, incarnation: int, executor: Executor) -> bytes:
        begun_ns = now_ns()
        session = self._sessions.get(spec.fingerprint)
        try:
            if session is None:
                session = Session(spec, self._cores)
                session.warm_up(session.contract.rows_fixed or 1)
                if session.contract.rows_fixed is None:
                    session.warm_up(min(spec.rows_max, WARM_UP_ROWS))
                self._sessions[spec.fingerprint] = session
        except IskanderError as error:
            return encode(LoadFailed(incarnation, spec.key, error.code, error.message))
        executor.sessions[spec.key] = session
        load_ms = (now_ns() - begun_ns) / NS_PER_MS
        return encode(
            Loaded(
                incarnation,
                spec.key,
                session.contract,
                session.providers,
                session.threads,
                round(load_ms, 1),
            )
        )

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_leaving = True
