"""Receive, run, answer, beat, drain: the worker's working thread, and the only user of its sockets.

Models are loaded beside it (`loading`).

Runs on: worker main.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

from iskander.clock import now_ns
from iskander.control.channel import FRAME_BYTES_MAX
from iskander.control.messages import (
    Done,
    Drain,
    Execute,
    Failed,
    Load,
    Loaded,
    LoadFailed,
    Stepped,
    ToGateway,
    Unload,
    Unloaded,
    decode_to_worker,
    encode,
)
from iskander.errors import Cancelled, IskanderError, ManifestError
from iskander_worker.attachments import Attachment, Attachments
from iskander_worker.loading.loader import LoadQueue

HOLD_NS: Final = 100_000
"""An answer waits for the next one where the batch between them is no larger than one that took
less than this. Batches of a few microseconds that came together are so answered together, which
halves the wake-ups; longer ones are answered one by one."""


class WorkerLoop:
    """Serves one gateway after another, and keeps the models between them.

    Args:
        cores: Physical cores of the plan; where fewer cpus could be had, those count.

    Attributes:
        is_leaving: This worker was asked to stop.
    """

    def __init__(self, cores: int) -> None:
        self._loads = LoadQueue(min(cores, len(os.sched_getaffinity(0))))
        self._gateways: Attachments | None = None
        self.is_leaving = False
        os.register_at_fork(after_in_child=self._after_fork)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def serve(self, gateways: Attachments, *, on_turn: Callable[[], bool]) -> bool:
        """Work until this worker is drained (True), or no gateway is left (False).

        Args:
            gateways: That this worker is attached to.
            on_turn: Called at every turn of the loop until it has done what it is for.
        """
        self._gateways = gateways
        is_drained = is_stopping = is_done = False
        loads = self._loads
        while gateways.attached:
            gateways.beat()
            is_done = is_done or on_turn()
            if loads.is_busy:
                self._answer_load(gateways)
            for attachment in gateways.next(loads.wake_fd if loads.is_busy else None):
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

    def finish(self) -> bool:
        """Load nothing more; whether this process can end in order."""
        return self._loads.leave()

    def _turn(self, gateways: Attachments, attachment: Attachment) -> Drain | None:
        """Take everything that a gateway has said, and answer."""
        channel = attachment.channel
        answers: list[ToGateway] = []
        for frame in channel.receive():
            for message in decode_to_worker(frame):
                if type(message) is Execute:
                    if answers and not _is_brief(message, attachment):
                        channel.send(encode(answers))
                        answers = []
                    gateways.beat(attachment, message.batch_id, message.model)
                    self._execute(message, attachment, answers)
                    if self._loads.is_busy:
                        self._answer_load(gateways)
                elif isinstance(message, Load):
                    self._loads.ask(attachment, message.model)
                elif isinstance(message, Unload):
                    attachment.executor.drop(message.model)
                    self._keep_used(gateways)
                    answers.append(Unloaded(message.model))
                else:
                    assert isinstance(message, Drain)
                    channel.send(encode(answers))
                    return message
        if answers:
            channel.send(encode(answers))
        return None

    def _on_drain(self, gateways: Attachments, attachment: Attachment, drain: Drain) -> bool:
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

    def _keep_used(self, gateways: Attachments) -> None:
        """What no gateway asked for, the next one will hardly want."""
        self._loads.keep(
            {each for one in gateways.attached for each in one.executor.sessions.values()}
        )

    def _answer_load(self, gateways: Attachments) -> None:
        """Tell what came of a load, where one is done and who asked for it is still there."""
        done = self._loads.take()
        if done is None or done[0] not in gateways.attached:
            return
        attachment, answers = done
        frame = encode(answers)
        if len(frame) > FRAME_BYTES_MAX:
            answer = answers[-1]
            assert isinstance(answer, Loaded | LoadFailed)
            attachment.executor.drop(answer.model)
            self._keep_used(gateways)
            frame = encode([_untold(answer.model, len(frame))])
        attachment.channel.send(frame)

    def _after_fork(self) -> None:
        """A child that a model's code has forked must not keep the end of this worker a secret."""
        for attachment in self._gateways.attached if self._gateways is not None else ():
            attachment.channel.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_leaving = True


def _untold(model: int, length: int) -> LoadFailed:
    """What to say of a model whose contract no frame holds."""
    error = ManifestError(
        f"what there is to tell of its inputs and outputs takes {length} bytes, and may take "
        f"{FRAME_BYTES_MAX}: it needs fewer of them, or shorter names"
    )
    return LoadFailed(model, error.code, error.message)


def _is_brief(message: Execute, attachment: Attachment) -> bool:
    """Whether this batch will not keep the answer of the one before waiting for long."""
    model, rows, run_ns = attachment.last_run
    return message.model == model and message.rows <= rows and run_ns < HOLD_NS
