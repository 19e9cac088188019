"""Models for a worker that came: asked for one after the other, and taken only if they fit.

The next one is asked for when the last is answered, so what is under way to a worker is never more
than a message.

Runs on: gateway loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from iskander.contract.tensors import Contract, require_room
from iskander.errors import IskanderError, ManifestError
from iskander.gateway.lanes.lane import Lane
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.workers import Worker
from iskander.wire.messages import Load, Loaded, LoadFailed, encode

log = logging.getLogger("iskander.supervisor")


class Loading:
    """Gives workers their models.

    Args:
        lanes: By the key of their model.
        output_bytes: That a worker's results may take.
        happened: Told when a worker has all of them, or cannot have one.
        on_refused: Told what cannot be served, before `happened` is.
    """

    def __init__(
        self,
        lanes: Mapping[int, Lane],
        output_bytes: int,
        *,
        happened: Callable[[Worker, Event], None],
        on_refused: Callable[[Worker, IskanderError], None],
    ) -> None:
        self._lanes = lanes
        self._output_bytes = output_bytes
        self._happened = happened
        self._on_refused = on_refused

    def ask_next(self, worker: Worker) -> None:
        """Ask for the first model that the worker does not have; with all of them it is loaded."""
        assert worker.channel is not None
        for key, lane in self._lanes.items():
            if key not in worker.models and lane.model.pool == worker.place.pool:
                worker.loading = lane.title
                worker.channel.send(encode([Load(lane.model)]))
                return
        self._happened(worker, Event.LOADED)

    def on_answer(self, worker: Worker, answer: Loaded | LoadFailed) -> None:
        """A worker has loaded the model that it was asked for, or cannot."""
        lane = self._lanes[answer.model]
        worker.loading = ""
        try:
            if isinstance(answer, LoadFailed):
                raise IskanderError.from_wire({"code": answer.code, "message": answer.message})
            self._accept(lane, answer.contract)
        except IskanderError as error:
            log.error(
                "worker %d cannot serve %s: %s", worker.place.index, lane.title, error.message
            )
            worker.complaint = f"model `{lane.title}`: {error.message}"
            self._on_refused(worker, ManifestError(worker.complaint))
            self._happened(worker, Event.LOAD_FAILED)
            return
        worker.models.add(answer.model)
        log.info(
            "worker %d loaded %s in %.0f ms: %s, %d threads",
            worker.place.index,
            lane.title,
            answer.load_ms,
            ", ".join(answer.providers),
            answer.threads,
        )
        if worker.state is State.LOADING:
            self.ask_next(worker)

    def _accept(self, lane: Lane, contract: Contract) -> None:
        if lane.contract is None:
            require_room(contract, lane.model.rows_max, self._output_bytes)
            lane.set_contract(contract)
        elif lane.contract != contract:
            raise ManifestError(
                "its contract is not the one that is being served: the files were changed"
            )
