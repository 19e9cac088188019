"""Scoring of one batch after another in a process of an engine.

Runs in: actors of Ray Data and Python workers of Spark; several threads call the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from iskander.client import Client
from iskander.engines.addresses import Servers
from iskander.engines.columns import Columns, joined
from iskander.engines.preferred import PreferredClient
from iskander.errors import IskanderError
from iskander.scoring.rows import ErrorBudget, RowPolicy

TTL_MS: Final = 3_600_000
"""Time in the queue: the server's default is for interactive calls."""


@dataclass(frozen=True, kw_only=True)
class ScoreSpec:
    """What the actors of a dataset need; small, and sent to each of them.

    Attributes:
        version: Version of the model, pinned.
        columns: Columns of the dataset.
        renamed: Name of the dataset's column for an input's name, where they differ.
        servers: Source of addresses.
        client: Options of the clients.
        on_error: `fail` or `null`.
        timeout_s: Timeout of a batch at one server.
        wait_s: Time for which a batch waits while no server is available.
    """

    version: str
    columns: Columns
    renamed: Mapping[str, str]
    servers: Servers
    client: Mapping[str, Any]
    on_error: str
    timeout_s: float
    wait_s: float


class Scorer:
    """Class for `map_batches`: tables in, kept columns and results out.

    Args:
        spec: What to score with.
    """

    def __init__(self, spec: ScoreSpec) -> None:
        self._spec = spec
        self._policy = RowPolicy(spec.on_error, spec.columns.results, ErrorBudget())
        self._client = PreferredClient(spec.servers.look_up, self._open, wait_s=spec.wait_s)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Score a table.

        Raises:
            IskanderError: Its columns do not match, no server is available in time, or the server
                rejects it.
        """
        plan = self._spec.columns
        kept = table.select(plan.kept(table.column_names))
        if not table.num_rows:
            return joined(plan, kept, plan.results.empty_table())
        # In one piece, so that it is one call.
        sent = table.select(plan.sent(table.column_names)).combine_chunks()
        try:
            results = self._score(sent)
        except IskanderError as error:
            if not self._policy.can_handle(error):
                raise
            (batch,) = sent.to_batches()
            outcome = self._policy.handle(batch, error, self._score_batch)
            results = pa.Table.from_batches([outcome.results])
        return joined(plan, kept, results)

    def _score(self, sent: Any) -> Any:  # noqa: ANN401
        spec = self._spec
        return self._client.score(
            spec.columns.model,
            sent,
            version=spec.version,
            columns=spec.renamed,
            terms={"ttl_ms": TTL_MS},
            timeout_s=spec.timeout_s,
        )

    def _score_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        result: pa.RecordBatch = self._score(batch)
        return result

    def _open(self, addresses: Sequence[str]) -> Client:
        return open_client(addresses, self._spec.client)


def open_client(addresses: Sequence[str], options: Mapping[str, Any]) -> Client:
    """Open a client; without TLS on a unix socket, which has none."""
    if all(address.startswith("unix:") for address in addresses):
        options = {name: value for name, value in options.items() if name != "tls"}
    return Client(addresses, **options)
