"""Receive, run, answer, beat, drain: the worker's working thread, and the only user of its socket.

Runs on: worker main.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence

from iskander.clock import NS_PER_MS, now_ns
from iskander.errors import Cancelled, IskanderError
from iskander.memory.beat import write_beat
from iskander.memory.segment import Segment
from iskander.wire.channel import Channel
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
    Notice,
    ToGateway,
    Welcome,
    decode_to_worker,
    encode,
)
from iskander_worker.abort import Aborter
from iskander_worker.executor import Executor
from iskander_worker.session import Session

BEAT_INTERVAL_S = 0.1
HOLD_NS = 100_000
"""An answer waits for the next one where the batch between them is no larger than one that took
less than this. Batches of a few microseconds that came together are so answered together, which
halves the wake-ups; longer ones are answered one by one."""
WARM_UP_ROWS = 128


class WorkerLoop:
    """Serves one gateway after another, and keeps the models between them.

    Args:
        cores: Physical cores of the plan; where fewer cpus could be had, those count.
        notices: What was refused of the plan, for each gateway to know.

    Attributes:
        is_leaving: This worker was asked to stop.
    """

    def __init__(self, cores: int, notices: Sequence[str]) -> None:
        self._cores = min(cores, len(os.sched_getaffinity(0)))
        self._notices = notices
        self._sessions: dict[str, Session] = {}
        self.is_leaving = False
        self._on_turn: Callable[[], object] = bool
        self._last_run = (-1, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def serve(
        self,
        connection: socket.socket,
        welcome: Welcome,
        descriptors: list[int],
        *,
        on_turn: Callable[[], object],
    ) -> bool:
        """Work for one gateway until it drains this worker (True) or is gone (False).

        Args:
            connection: On which the gateway said welcome; owned from here on.
            welcome: What it said.
            descriptors: What came with it; owned from here on.
            on_turn: Called at every turn of the loop; costs next to nothing.
        """
        self._on_turn = on_turn
        input_fd, output_fd, beat_fd, abort_fd = descriptors
        inputs = Segment.attach(input_fd, welcome.input_bytes, is_writable=False)
        outputs = Segment.attach(output_fd, welcome.output_bytes, is_writable=True)
        beat = Segment.attach(beat_fd, welcome.beat_bytes, is_writable=True)
        channel = Channel(connection, BEAT_INTERVAL_S)
        executor = Executor(inputs, outputs)
        is_drained = False
        try:
            is_drained = self._turn(channel, executor, Aborter(abort_fd), beat.view)
            return is_drained
        finally:
            if is_drained:
                channel.leave_open()
            else:
                channel.close()
            executor.forget()
            # What this gateway did not ask for, the next one will hardly want.
            used = set(executor.sessions.values())
            self._sessions = {key: kept for key, kept in self._sessions.items() if kept in used}
            for segment in (inputs, outputs, beat):
                segment.close()

    def _turn(
        self, channel: Channel, executor: Executor, aborter: Aborter, beat: memoryview
    ) -> bool:
        has_said_leaving = False
        if self._notices:
            channel.send(encode([Notice(text) for text in self._notices]))
        while not channel.has_ended:
            write_beat(beat, now_ns(), 0)
            self._on_turn()
            answers: list[ToGateway] = []
            for frame in channel.receive():
                for message in decode_to_worker(frame):
                    if type(message) is Execute:
                        if answers and not self._is_brief(message):
                            channel.send(encode(answers))
                            answers = []
                        write_beat(beat, now_ns(), message.batch_id)
                        answers.append(self._execute(message, executor, aborter))
                    elif isinstance(message, Load):
                        answers.append(self._load(message.model, executor))
                    else:
                        assert isinstance(message, Drain)
                        channel.send(encode(answers))
                        return True
            if self.is_leaving and not has_said_leaving:
                answers.append(Leaving())
                has_said_leaving = True
            if answers:
                channel.send(encode(answers))
        return self.is_leaving

    def _is_brief(self, message: Execute) -> bool:
        """Whether this batch will not keep the answer of the one before waiting for long."""
        model, rows, run_ns = self._last_run
        return message.model == model and message.rows <= rows and run_ns < HOLD_NS

    def _execute(self, message: Execute, executor: Executor, aborter: Aborter) -> Done | Failed:
        # Step 6
        begun_ns = now_ns()
        try:
            executor.execute(message, aborter.begin(message.batch_id))
        except IskanderError as error:
            is_aborted = aborter.end()
            reason = Cancelled("nobody waited for this batch any more") if is_aborted else error
            return Failed(message.batch_id, reason.code, reason.message)
        aborter.end()
        run_ns = now_ns() - begun_ns
        self._last_run = (message.model, message.rows, run_ns)
        return Done(message.batch_id, run_ns)

    def _load(self, spec: ModelSpec, executor: Executor) -> Loaded | LoadFailed:
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
            return LoadFailed(spec.key, error.code, error.message)
        executor.sessions[spec.key] = session
        load_ms = (now_ns() - begun_ns) / NS_PER_MS
        return Loaded(
            spec.key,
            session.contract,
            session.providers,
            session.threads,
            round(load_ms, 1),
        )

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_leaving = True
