"""Reads worker messages from the channels and dispatches them.

Batch results go directly to the dispatcher; the rare other messages go to the supervisor.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from iskander.errors import ProtocolError
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.supervision.worker import Worker
from iskander.interprocess.control.channel import Channel
from iskander.interprocess.control.messages import Done, Failed, ToGateway, decode_to_gateway

if TYPE_CHECKING:
    from iskander.gateway.supervision.supervisor import Supervisor

MESSAGES_PER_TURN: Final = 64
"""Credits keep far fewer in transit; the messages of a faulty worker share the loop with others."""


class WorkerMessageReader:
    """Reads the channels of all workers."""

    def __init__(self, dispatcher: Dispatcher, handler: Supervisor) -> None:
        self._dispatcher = dispatcher
        self._handler = handler

    def read(self, worker: Worker, channel: Channel) -> None:
        """Process frames of about `MESSAGES_PER_TURN` messages, and the end of the channel.

        The rest follows in the next turn: epoll may signal a channel only once.
        """
        if worker.channel is not channel:
            return  # The worker was released in an earlier turn.
        dispatcher, handler = self._dispatcher, self._handler
        count = 0
        for messages in self._messages(worker, channel):
            for message in messages:
                try:
                    if type(message) is Done:
                        dispatcher.on_done(worker, message)
                    elif type(message) is Failed:
                        dispatcher.on_failed(worker, message)
                    else:
                        handler.on_message(worker, message)
                except Exception as error:  # It ends its worker, and no other part of the gateway.
                    handler.on_unprocessable(worker, message, error)
            count += len(messages) or 1
            if count >= MESSAGES_PER_TURN:
                asyncio.get_running_loop().call_soon(self.read, worker, channel)
                break
        if channel.has_ended:
            handler.on_end(worker, channel)
        elif worker.batches >= worker.recycle_at:
            handler.recycling.check(worker)
        dispatcher.pump()

    def _messages(self, worker: Worker, channel: Channel) -> Iterator[list[ToGateway]]:
        """Yield the messages of each frame; an empty list for a malformed frame."""
        is_read = False
        while not is_read:
            try:
                for frame in channel.receive():
                    yield decode_to_gateway(frame)
                is_read = True
            except (ValueError, RecursionError, ProtocolError) as error:
                self._handler.on_malformed(worker, error)
                yield []
