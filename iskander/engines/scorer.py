"""Scoring of one batch after another in a process of an engine.

Runs in: actors of Ray Data and Python workers of Spark; several threads call the same object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pyarrow as pa

from iskander.client import Client
from iskander.client.calls.retry import is_gateway_failure, is_retryable
from iskander.engines.addresses import Servers
from iskander.engines.columns import Columns, join_columns
from iskander.errors import IskanderError
from iskander.foundation import clock
from iskander.lake.rows import ErrorBudget, RowPolicy

PAUSE_S: Final = 0.2
"""Pause after a call that no server answered, with all its retries."""
TTL_MS: Final = 3_600_000
"""Time that a call may wait in the server's queue; the server's default is for interactive
calls."""


@dataclass(frozen=True, kw_only=True)
class ScoreSpec:
    """Arguments of the actors that score a dataset; small, since each actor receives a copy.

    Attributes:
        version: Version of the model for all calls.
        columns: Columns of the dataset.
        renamed: Name of the dataset's column for an input's name, where they differ.
        servers: Finds the addresses of the servers.
        client: Options of the clients.
        runtimes: Terms of the calls, which only servers with the driver's runtimes accept.
        on_error: `fail` or `null`.
        timeout_s: Timeout of a call with a batch, retries included.
        wait_s: Time for which a batch waits while no server is available.
    """

    version: str
    columns: Columns
    renamed: Mapping[str, str]
    servers: Servers
    client: Mapping[str, Any]
    runtimes: Mapping[str, str] = field(default_factory=dict)
    on_error: str
    timeout_s: float
    wait_s: float


class Scorer:
    """Class for `map_batches`: tables in, kept columns and results out.

    Args:
        spec: Model, columns and servers of the scoring.
    """

    def __init__(self, spec: ScoreSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._addresses = spec.servers.look_up()
        self._client = self._addresses.open(spec.client)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Score a table; the limit of rejected rows counts the rows of this table only.

        Raises:
            IskanderError: The table's columns do not match, no server is available in time, or the
                server rejects it.
        """
        return self.task()(table)

    def task(self) -> Callable[[pa.Table], pa.Table]:
        """Return a function that scores tables.

        One limit of rejected rows counts all its tables.
        """
        spec = self._spec
        policy = RowPolicy(spec.on_error, spec.columns.results, ErrorBudget())
        return partial(self._score_table, policy)

    def _score_table(self, policy: RowPolicy, table: pa.Table) -> pa.Table:
        plan = self._spec.columns
        kept = table.select(plan.kept_columns(table.column_names))
        if not table.num_rows:
            return join_columns(plan, kept, plan.results.empty_table())
        # The table gets one chunk, so that it is one call.
        sent = table.select(plan.sent_columns(table.column_names)).combine_chunks()
        try:
            results = self._score(sent)
        except IskanderError as error:
            if not policy.can_handle(error):
                raise
            (batch,) = sent.to_batches()
            outcome = policy.handle(batch, error, self._score_batch)
            results = pa.Table.from_batches([outcome.results])
        return join_columns(plan, kept, results)

    def _score(self, sent: Any) -> Any:  # noqa: ANN401
        """Score a table with any server; wait for a server up to the batch's wait time."""
        end_ns: int | None = None
        while True:
            client = self._client
            try:
                return self._call(client, sent)
            except IskanderError as error:
                if client is not self._client:
                    continue  # Another thread has replaced the client, and so ended the call.
                if not is_retryable(error) and not is_gateway_failure(error):
                    raise
                now_ns = clock.now_ns()
                end_ns = end_ns or now_ns + int(self._spec.wait_s * clock.NS_PER_S)
                if now_ns >= end_ns:
                    error.add_note(f"no server scored the batch within {self._spec.wait_s:g} s")
                    raise
            clock.pause_s(PAUSE_S)
            self._look_up_after(client)

    def _look_up_after(self, failed: Client) -> None:
        """Replace the client whose call has failed, if the addresses have changed."""
        with self._lock:
            if failed is not self._client:
                return
            addresses = self._spec.servers.look_up()
            if any(addresses) and addresses != self._addresses:
                self._client = addresses.open(self._spec.client)
                self._addresses = addresses
                failed.close()

    def _call(self, client: Client, sent: Any) -> Any:  # noqa: ANN401
        spec = self._spec
        return client.score(
            spec.columns.model,
            sent,
            version=spec.version,
            columns=spec.renamed,
            terms={"ttl_ms": TTL_MS, **spec.runtimes},
            timeout_s=spec.timeout_s,
        )

    def _score_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        result: pa.RecordBatch = self._score(batch)
        return result
