"""Receive, run, answer, beat, drain: the worker's working thread, and the only user of its sockets.

Runs on: worker main.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from iskander.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.errors import Cancelled, IskanderError
from iskander.wire.messages import (
    Done,
    Drain,
    Execute,
    Failed,
    Load,
    Loaded,
    LoadFailed,
    ModelSpec,
    Notice,
    Stepped,
    ToGateway,
    decode_to_worker,
    encode,
)
from iskander_worker.executor import Executor
from iskander_worker.gateways import Attachment, Gateways
from iskander_worker.session import Session

HOLD_NS = 100_000
"""An answer waits for the next one where the batch between them is no larger than one that took
less than this. Batches of a few microseconds that came together are so answered together, which
halves the wake-ups; longer ones are answered one by one."""
LOAD_NS = 600 * NS_PER_S
"""How long a load for one gateway may keep the others without a beat; the one that asked for it has
a limit of its own."""


class WorkerLoop:
    """Serves one gateway after another, and keeps the models between them.

    Args:
        cores: Physical cores of the plan; where fewer cpus could be had, those count.

    Attributes:
        is_leaving: This worker was asked to stop.
    """

    def __init__(self, cores: int) -> None:
        self._cores = min(cores, len(os.sched_getaffinity(0)))
        self._sessions: dict[str, Session] = {}
        self._gateways: Gateways | None = None
        self.is_leaving = False
        os.register_at_fork(after_in_child=self._after_fork)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def serve(self, gateways: Gateways, *, on_turn: Callable[[], object]) -> bool:
        """Work until this worker is drained (True), or no gateway is left (False).

        Args:
            gateways: That this worker is attached to.
            on_turn: Called at every turn of the loop; costs next to nothing.
        """
        self._gateways = gateways
        is_drained = is_stopping = False
        while gateways.attached:
            gateways.beat()
            on_turn()
            for attachment in gateways.next():
                drain = self._turn(gateways, attachment)
                if drain is not None:
                    is_stopping = is_stopping or drain.is_stopping
                    is_drained = self._on_drain(gateways, attachment, drain) or is_drained
                elif attachment.channel.has_ended:
                    self._keep_used(gateways)
                    gateways.drop(attachment)
            if self.is_leaving or gateways.is_moved:
                for attachment in gateways.attached:
                    attachment.tell_leaving()
            elif not is_drained:
                gateways.look_for_missing()
        gateways.forget_asked()
        # Where the first one is not there to end this worker, the last to stop does.
        return is_drained or is_stopping or self.is_leaving or gateways.is_moved

    def _turn(self, gateways: Gateways, attachment: Attachment) -> Drain | None:
        """Take everything that a gateway has said, and answer."""
        channel = attachment.channel
        answers: list[ToGateway] = []
        for frame in channel.receive():
            for message in decode_to_worker(frame):
                if type(message) is Execute:
                    if answers and not _is_brief(message, attachment):
                        channel.send(encode(answers))
                        answers = []
                    gateways.beat(attachment, message.batch_id)
                    self._execute(message, attachment, answers)
                elif isinstance(message, Load):
                    gateways.beat(ahead_ns=LOAD_NS)
                    answers += self._load(message.model, attachment.executor)
                    gateways.beat()
                else:
                    assert isinstance(message, Drain)
                    channel.send(encode(answers))
                    return message
        if answers:
            channel.send(encode(answers))
        return None

    def _on_drain(self, gateways: Gateways, attachment: Attachment, drain: Drain) -> bool:
        """Let a gateway go; whether it was the first, with which this worker ends.

        Where that one stops, its siblings do too, and finish what they have; where it only replaces
        this worker, they have to be told.
        """
        is_first = gateways.is_first(attachment)
        self._keep_used(gateways)
        gateways.drop(attachment, is_open_until_exit=is_first)
        if is_first and not drain.is_stopping:
            for each in gateways.attached:
                each.tell_leaving()
        return is_first

    def _execute(self, message: Execute, attachment: Attachment, answers: list[ToGateway]) -> None:
        """Run a batch, and add what came of it to the answers."""
        # Step 6
        begun_ns = now_ns()
        aborter = attachment.aborter
        run = aborter.begin(message.batch_id)
        try:
            attachment.executor.execute(message, run)
        except IskanderError as error:
            is_aborted = aborter.end()
            reason = Cancelled("nobody waited for this batch any more") if is_aborted else error
            answers.append(Failed(message.batch_id, reason.code, reason.message))
            run.steps = ()
            return
        aborter.end()
        run_ns = now_ns() - begun_ns
        attachment.last_run = (message.model, message.rows, run_ns)
        answers.append(Done(message.batch_id, run_ns))
        if run.steps:
            answers.append(Stepped(message.model, run.steps))
            run.steps = ()

    def _keep_used(self, gateways: Gateways) -> None:
        """What no gateway asked for, the next one will hardly want."""
        used = {each for one in gateways.attached for each in one.executor.sessions.values()}
        self._sessions = {key: kept for key, kept in self._sessions.items() if kept in used}

    def _load(self, spec: ModelSpec, executor: Executor) -> list[ToGateway]:
        begun_ns = now_ns()
        session = self._sessions.get(spec.fingerprint)
        try:
            if session is None:
                session = Session(spec, self._cores)
                session.warm_up(spec.rows_max)
                self._sessions[spec.fingerprint] = session
        except IskanderError as error:
            return [LoadFailed(spec.key, error.code, error.message)]
        executor.sessions[spec.key] = session
        load_ms = (now_ns() - begun_ns) / NS_PER_MS
        loaded = Loaded(
            spec.key,
            session.contract,
            session.providers,
            session.threads,
            round(load_ms, 1),
        )
        notices = [Notice(f"{spec.name}/{spec.version}: {text}") for text in session.notices]
        return [*notices, loaded]

    def _after_fork(self) -> None:
        """A child that a model's code has forked must not keep the end of this worker a secret."""
        for attachment in self._gateways.attached if self._gateways is not None else ():
            attachment.channel.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_leaving = True


def _is_brief(message: Execute, attachment: Attachment) -> bool:
    """Whether this batch will not keep the answer of the one before waiting for long."""
    model, rows, run_ns = attachment.last_run
    return message.model == model and message.rows <= rows and run_ns < HOLD_NS
