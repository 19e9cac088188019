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
    ToGateway,
    Welcome,
    decode_to_worker,
    encode,
)
from iskander_worker.executor import Executor
from iskander_worker.session import Session

BEAT_INTERVAL_S = 0.1
HOLD_NS = 100_000
"""An answer waits for the next one where the batch between them is no larger than one that took
less than this. Batches of a few microseconds that came together are so answered together, which
halves the wake-ups; longer ones are answered one by one."""
DRAIN_LINGER_MS = 1000
WARM_UP_ROWS = 128


class WorkerLoop:
    """Serves one gateway after another, and keeps the models between them.

    Attributes:
        is_leaving: This worker was asked to stop.
    """

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0))
        self._sessions: dict[str, Session] = {}
        self._context = open_context()
        self.is_leaving = False
        self._last_run = (-1, 0, 0)
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
        waiter = Waiter(receiver, connection.fileno())
        executor = Executor(inputs, outputs)
        linger_ms = 0
        try:
            sender.send(encode([Ready(welcome.incarnation)]))
            is_drained = self._turn(welcome, receiver, sender, executor, waiter, beat.view)
            linger_ms = DRAIN_LINGER_MS if is_drained else 0
            return is_drained
        finally:
            executor.forget()
            # What this gateway did not ask for, the next one will hardly want.
            used = set(executor.sessions.values())
            self._sessions = {key: kept for key, kept in self._sessions.items() if kept in used}
            waiter.close()
            sender.close(linger_ms=linger_ms)
            receiver.close()
            for segment in (inputs, outputs, beat):
                segment.close()

    def _turn(
        self,
        welcome: Welcome,
        receiver: Receiver,
        sender: Sender,
        executor: Executor,
        waiter: Waiter,
        beat: memoryview,
    ) -> bool:
        incarnation = welcome.incarnation
        has_said_leaving = False
        while True:
            write_beat(beat, now_ns(), 0)
            answers: list[ToGateway] = []
            for frame in receiver.receive_waiting():
                for message in decode_to_worker(frame):
                    if type(message) is Execute:
                        if answers and not self._is_brief(message):
                            sender.send(encode(answers))
                            answers = []
                        write_beat(beat, now_ns(), message.batch_id)
                        answers.append(self._execute(message, incarnation, executor))
                    elif isinstance(message, Load):
                        answers.append(self._load(message.model, incarnation, executor))
                    else:
                        assert isinstance(message, Drain)
                        sender.send(encode(answers))
                        return True
            if self.is_leaving and not has_said_leaving:
                answers.append(Leaving(incarnation))
                has_said_leaving = True
            if answers:
                sender.send(encode(answers))
                continue
            if waiter.wait(BEAT_INTERVAL_S):
                return self.is_leaving

    def _is_brief(self, message: Execute) -> bool:
        """Whether this batch will not keep the answer of the one before waiting for long."""
        model, rows, run_ns = self._last_run
        return message.model == model and message.rows <= rows and run_ns < HOLD_NS

    def _execute(self, message: Execute, incarnation: int, executor: Executor) -> Done | Failed:
        # Step 6
        begun_ns = now_ns()
        try:
            executor.execute(message)
        except IskanderError as error:
            return Failed(incarnation, message.batch_id, error.code, error.message)
        run_ns = now_ns() - begun_ns
        self._last_run = (message.model, message.rows, run_ns)
        return Done(incarnation, message.batch_id, run_ns)

    def _load(self, spec: ModelSpec, incarnation: int, executor: Executor) -> Loaded | LoadFailed:
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
            return LoadFailed(incarnation, spec.key, error.code, error.message)
        executor.sessions[spec.key] = session
        load_ms = (now_ns() - begun_ns) / NS_PER_MS
        return Loaded(
            incarnation,
            spec.key,
            session.contract,
            session.providers,
            session.threads,
            round(load_ms, 1),
        )

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_leaving = True
