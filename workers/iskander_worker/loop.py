"""Event loop of a worker: receives messages, runs batches, answers, writes heartbeats.

Its thread runs all batches and is the only user of the channels. Models are loaded on another
thread (`loading`).

Runs on: worker main.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
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
    Probe,
    Probed,
    Stepped,
    ToGateway,
    Unload,
    Unloaded,
    decode_to_worker,
    encode,
)
from iskander.errors import Cancelled, IskanderError, ManifestError
from iskander_worker.attachments import Attachment, Attachments
from iskander_worker.backends import Run
from iskander_worker.loading.loader import LoadQueue

SHARED_ANSWER_NS: Final = 100_000
"""An answer waits for the next one if the last batch took less time than this, and the next batch
has no more rows. Batches of a few microseconds that arrived together thus share one answer frame,
which halves the wake-ups; longer ones are answered one by one."""


class WorkerLoop:
    """Serves one gateway after another, and keeps the models in between.

    `is_leaving` is set by a stop signal.
    """

    def __init__(self, cores: int) -> None:
        self._loads = LoadQueue(min(cores, len(os.sched_getaffinity(0))))
        self._attachments: Attachments | None = None
        self.is_leaving = False
        os.register_at_fork(after_in_child=self._after_fork)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def serve(self, attachments: Attachments, *, on_iteration: Callable[[], bool]) -> bool:
        """Run until this worker is drained (True), or all gateway connections are lost (False).

        `on_iteration` is called in every event loop iteration until it returns True.
        """
        self._attachments = attachments
        is_drained = is_stopping = is_done = False
        loads = self._loads
        while attachments.attached:
            attachments.heartbeat()
            is_done = is_done or on_iteration()
            if loads.is_busy:
                self._answer_load(attachments)
            for attachment in attachments.wait(loads.wake_fd if loads.is_busy else None):
                drain = self._handle_messages(attachments, attachment)
                if drain is not None:
                    is_stopping = is_stopping or drain.is_stopping
                    is_drained = self._on_drain(attachments, attachment, drain) or is_drained
                elif attachment.channel.has_ended:
                    self._close_unused(attachments)
                    attachments.drop(attachment)
            if self.is_leaving or attachments.is_reassigned:
                for attachment in attachments.attached:
                    attachment.send_leaving()
            elif not is_drained:
                attachments.attach_missing()
        attachments.abort_handshakes()
        # Without the first gateway process, the last one that stops ends this worker.
        return is_drained or is_stopping or self.is_leaving or attachments.is_reassigned

    def finish(self) -> bool:
        """Start no more loads; return whether this process can exit in an orderly way."""
        return self._loads.shut_down()

    def _handle_messages(self, attachments: Attachments, attachment: Attachment) -> Drain | None:
        """Handle and answer all messages of a gateway process, up to a `Drain`."""
        channel = attachment.channel
        answers: list[ToGateway] = []
        for frame in channel.receive():
            for message in decode_to_worker(frame):
                if type(message) is Execute:
                    if answers and not _is_brief(message, attachment):
                        channel.send(encode(answers))
                        answers = []
                    beat = partial(
                        attachments.heartbeat, attachment, message.batch_id, message.model
                    )
                    beat()
                    self._execute(message, attachment, answers, beat)
                    if self._loads.is_busy:
                        self._answer_load(attachments)
                elif isinstance(message, Load):
                    self._loads.put(attachment, message.model)
                elif isinstance(message, Unload):
                    attachment.executor.drop(message.model)
                    self._close_unused(attachments)
                    answers.append(Unloaded(message.model))
                elif isinstance(message, Probe):
                    run, session = Run(), attachment.executor.sessions.get(message.model)
                    run.heartbeat = attachments.heartbeat
                    reason = session.probe(run) if session is not None else ""
                    answers.append(Probed(message.model, reason))
                else:
                    assert isinstance(message, Drain)
                    channel.send(encode(answers))
                    return message
        if answers:
            channel.send(encode(answers))
        return None

    def _on_drain(self, attachments: Attachments, attachment: Attachment, drain: Drain) -> bool:
        """Detach from a gateway process; return whether it was the first, which ends this worker.

        If the first one stops, its peers stop too and drain by themselves; if it only replaces
        this worker, they receive `Leaving`.
        """
        is_first = attachments.is_first(attachment)
        self._close_unused(attachments)
        attachments.drop(attachment, is_open_until_exit=is_first)
        if is_first and not drain.is_stopping:
            for each in attachments.attached:
                each.send_leaving()
        return is_first

    def _execute(
        self,
        message: Execute,
        attachment: Attachment,
        answers: list[ToGateway],
        heartbeat: Callable[[], None],
    ) -> None:
        # Step 6
        begun_ns = now_ns()
        canceller = attachment.canceller
        run = canceller.begin(message.batch_id)
        run.deadline_ns, run.hops, run.heartbeat = message.deadline_ns, message.hops, heartbeat
        try:
            attachment.executor.execute(message, run)
        except IskanderError as error:
            is_aborted = canceller.end()
            reason = Cancelled("batch cancelled: its callers are gone") if is_aborted else error
            answers.append(
                Failed(message.batch_id, reason.code, reason.message, reason.retry_after_ms)
            )
            run.steps = ()
            return
        canceller.end()
        run_ns = now_ns() - begun_ns
        attachment.last_run = (message.model, message.rows, run_ns)
        answers.append(Done(message.batch_id, run_ns))
        if run.steps:
            answers.append(Stepped(message.model, run.steps))
            run.steps = ()

    def _close_unused(self, attachments: Attachments) -> None:
        """Close the models that no gateway process uses."""
        self._loads.keep(
            {each for one in attachments.attached for each in one.executor.sessions.values()}
        )

    def _answer_load(self, attachments: Attachments) -> None:
        """Send the answers of a finished load, if its gateway process is still attached."""
        done = self._loads.get()
        if done is None or done[0] not in attachments.attached:
            return
        attachment, answers = done
        frame = encode(answers)
        if len(frame) > FRAME_BYTES_MAX:
            answer = answers[-1]
            assert isinstance(answer, Loaded | LoadFailed)
            attachment.executor.drop(answer.model)
            self._close_unused(attachments)
            oversized = ManifestError(
                f"the description of its inputs and outputs has {len(frame)} bytes, limit "
                f"{FRAME_BYTES_MAX}: use fewer of them, or shorter names"
            )
            frame = encode([LoadFailed(answer.model, oversized.code, oversized.message)])
        attachment.channel.send(frame)

    def _after_fork(self) -> None:
        """Close the channels in a child of a model's code, so that they end with this worker."""
        for attachment in self._attachments.attached if self._attachments is not None else ():
            attachment.channel.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_leaving = True


def _is_brief(message: Execute, attachment: Attachment) -> bool:
    """Whether this batch is so short that the last answer can wait for it."""
    model, rows, run_ns = attachment.last_run
    return message.model == model and message.rows <= rows and run_ns < SHARED_ANSWER_NS
