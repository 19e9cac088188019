"""Scoring of a Spark DataFrame.

The model, its version and the columns are checked on the driver, before anything runs.

Runs in: drivers of Spark, and `Scorer.__call__` in its Python workers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from iskander.client import Client, ModelDescription, Retry, Tls
from iskander.client.calls.credentials import Token
from iskander.client.calls.retry import require_seconds
from iskander.client.client import DEFAULT_RETRY
from iskander.engines.columns import plan_columns, require_cuttable
from iskander.engines.runtimes import common_runtimes
from iskander.engines.scorer import ScoreSpec
from iskander.errors import ConfigError, ContractError
from iskander.spark.schemas import arrow_type, as_batches, spark_fields, spark_results
from iskander.spark.servers import node_servers
from iskander.spark.workers import cut_tables, in_order, open_scorer

BATCH_ROWS: Final = 4096
ON_ERROR: Final = ("fail", "null")


class Scorer:
    """Function for `DataFrame.mapInArrow`: batches in, kept columns and results out.

    Spark sends it to its Python workers; each process opens its clients once.

    Args:
        description: Description of the model.
        spec: Model, columns and servers of the scoring.
        batch_rows: Maximum rows of a call.
    """

    def __init__(self, description: ModelDescription, spec: ScoreSpec, batch_rows: int) -> None:
        self._description = description
        self._spec = spec
        self._batch_rows = batch_rows
        self._results = spark_results(spec.columns.results)
        self._key = uuid.uuid4().hex

    def __repr__(self) -> str:
        return f"Scorer({self._description.name!r}, version={self.version!r})"

    @property
    def version(self) -> str:
        """Version of the model for all batches."""
        return self._spec.version

    def schema(self, given: Any) -> Any:  # noqa: ANN401
        """Return the schema of the output, as a `StructType`.

        Args:
            given: Schema of the DataFrame, `df.schema`.

        Raises:
            ConfigError: `given` is no `StructType`, or a column of `keep` is missing.
            ContractError: A column is missing, has another type, or has the name of a result.
        """
        if not hasattr(given, "jsonValue") or not hasattr(given, "fields"):
            kind = type(given).__name__
            raise ConfigError(f"`schema` is of the type {kind}; expected a StructType: `df.schema`")
        fields = {field["name"]: field for field in given.jsonValue()["fields"]}
        kept = self._check_columns(fields, [field.name for field in given.fields])
        results = spark_fields(list(self._spec.columns.results))
        return type(given).fromJson(
            {"type": "struct", "fields": [*(fields[name] for name in kept), *results]}
        )

    def ddl(self, given: Any) -> str:  # noqa: ANN401
        """Return the schema of the output, as a DDL string; see `schema`."""
        return str(self.schema(given).toDDL())

    def apply(self, frame: Any) -> Any:  # noqa: ANN401
        """Return a DataFrame with the kept columns and the results; it is scored when it is used.

        Args:
            frame: A DataFrame, of a batch job or of Structured Streaming.

        Raises:
            ConfigError: `frame` is no DataFrame, or a column of `keep` is missing.
            ContractError: A column is missing, has another type, or has the name of a result.
        """
        if not hasattr(frame, "mapInArrow"):
            kind = type(frame).__name__
            raise ConfigError(f"`frame` is of the type {kind}; expected a DataFrame of Spark")
        return frame.mapInArrow(self, self.schema(frame.schema))

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Score the batches of a task, several at a time; yield the output in their order.

        Raises:
            IskanderError: A batch does not match, no server is available in time, or the server
                rejects it.
        """
        score = open_scorer(self._key, self._spec).task()
        for table in in_order(score, cut_tables(batches, self._batch_rows)):
            yield from as_batches(table, self._results)

    def _check_columns(self, fields: Mapping[str, Any], names: Sequence[str]) -> list[str]:
        """Check the columns of a DataFrame; return the kept ones."""
        plan = self._spec.columns
        types = {name: arrow_type(field["type"]) for name, field in fields.items()}
        for name in plan.sent_columns(names):
            if types[name] is None:
                kind = fields[name]["type"]
                text = f"column `{name}` has the Spark type {kind}, which is not supported"
                raise ContractError(f"{text} as an input", column=name, model=plan.model)
        schema = pa.schema([(name, types[name] or pa.null()) for name in names])
        plan_columns(self._description, schema, columns=self._spec.renamed, keep=plan.keep)
        return plan.kept_columns(names)


def scorer(  # noqa: PLR0913 - options of one job, all by keyword
    model: str,
    target: str | Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] | None = None,
    version: str | None = None,
    preferred: str | int | None = None,
    batch_rows: int = BATCH_ROWS,
    on_error: str = "fail",
    timeout_s: float = 300.0,
    wait_s: float = 60.0,
    token: Token = None,
    tls: Tls | None = None,
    retry: Retry = DEFAULT_RETRY,
) -> Scorer:
    """Return the function that scores a DataFrame: `scorer(...).apply(df)`.

    A batch may be scored twice after a failure; each row is in the output once.

    Args:
        model: Name of the model.
        target: Address of a server, or several, that the driver and all executors reach.
        columns: Name of the DataFrame's column for an input's name, where they differ.
        keep: Columns of the DataFrame in the output; None: all.
        version: Version or alias; None: the server's routing decides, once for all rows. A
            streaming query keeps the version until it is started again.
        preferred: Server of each executor's node, used while the server is available: an address
            that is the same on each node, such as `unix:PATH`, or a port on the executor's host.
            The host is `SPARK_LOCAL_HOSTNAME`, `SPARK_LOCAL_IP` or 127.0.0.1.
        batch_rows: Maximum rows of a call; larger batches of Spark are cut.
        on_error: `fail`, or `null` for null results of the rows that the model rejects.
        timeout_s: Timeout of a batch, retries included.
        wait_s: Time for which a batch waits while no server is available.
        token: Token of all calls, or a function that returns it, which runs on the executors.
        tls: TLS files, at the same paths on the driver and on each executor.
        retry: Retries of a batch before another server is tried.

    Raises:
        ConfigError: An option is invalid.
        ContractError: A kept column has the name of a result, Spark has no type for a result, or
            the model ranks the rows of a batch.
        ModelNotFound: There is no such model or version.
        NotReady: No server is ready, or this process cannot reach one.
        RuntimeDiffers: The servers run the model with different libraries, providers or threads.
    """
    if type(batch_rows) is not int or batch_rows < 1:
        raise ConfigError(f"`batch_rows` is {batch_rows!r}; the minimum is 1")
    if on_error not in ON_ERROR:
        raise ConfigError(f"`on_error` is {on_error!r}; expected `fail` or `null`")
    for name, seconds in (("timeout_s", timeout_s), ("wait_s", wait_s)):
        require_seconds(seconds, name)
    servers = node_servers(target, preferred)
    options: dict[str, Any] = {"token": token, "tls": tls, "retry": retry}
    with Client(servers.addresses(), **options) as client:
        description = client.model(model, version=version).description
    require_cuttable(description, "Spark", "`applyInArrow`")
    if description.ranked_within:
        raise ContractError(
            f"model `{model}` ranks the rows of a batch, and Spark cuts the rows into batches at "
            "any place; score each group with `iskander.client.Client` in `applyInArrow`",
            model=model,
        )
    spec = ScoreSpec(
        version=description.version,
        columns=plan_columns(description, None, columns=columns, keep=keep),
        renamed=dict(columns or {}),
        servers=servers,
        client=options,
        runtimes=common_runtimes(description, servers.addresses(), options),
        on_error=on_error,
        timeout_s=timeout_s,
        wait_s=wait_s,
    )
    return Scorer(description, spec, batch_rows)
