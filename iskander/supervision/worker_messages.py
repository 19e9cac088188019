"""What a worker says: taken off its socket, and given to whom it concerns.

Answers to batches go straight to the dispatcher; everything else is rare, and the supervisor's.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from iskander.control.channel import Channel
from iskander.control.messages import Done, Failed, ToGateway, decode_to_gateway
from iskander.errors import ProtocolError
from iskander.scheduling.dispatch import Dispatcher
from iskander.supervision.worker import Worker


class WorkerMessageHandler(Protocol):
    """Who is told of what is not about a batch."""

    def on_message(self, worker: Worker, message: ToGateway) -> None:
        """A worker has said something."""

    def on_garbled(self, worker: Worker, error: Exception) -> None:
        """What it said was not understood, and may have been the end of a batch."""

    def on_end(self, worker: Worker, channel: Channel) -> None:
        """It says nothing any more."""

    def on_worn(self, worker: Worker) -> None:
        """It has run as many batches as it should."""


class WorkerMessageReader:
    """Listens to all workers.

    Args:
        dispatcher: Told what came of batches.
        listener: Told the rest.
    """

    def __init__(self, dispatcher: Dispatcher, listener: WorkerMessageHandler) -> None:
        self._dispatcher = dispatcher
        self._listener = listener

    def take(self, worker: Worker, channel: Channel) -> None:
        """Take everything that a worker has said, its end too."""
        dispatcher, listener = self._dispatcher, self._listener
        for messages in self._messages(worker, channel):
            for message in messages:
                if type(message) is Done:
                    dispatcher.on_done(worker, message)
                elif type(message) is Failed:
                    dispatcher.on_failed(worker, message)
                else:
                    listener.on_message(worker, message)
        if channel.has_ended:
            listener.on_end(worker, channel)
        elif worker.batches >= worker.recycle_at:
            listener.on_worn(worker)
        dispatcher.pump()

    def _messages(self, worker: Worker, channel: Channel) -> Iterator[list[ToGateway]]:
        """What a worker has said, a frame each time."""
        is_read = False
        while not is_read:
            try:
                for frame in channel.receive():
                    yield decode_to_gateway(frame)
                is_read = True
            except (ValueError, ProtocolError) as error:
                self._listener.on_garbled(worker, error)
