"""Scoring of a Ray Data dataset.

The model, its version and the columns are checked on the driver, before anything runs.

Runs in: drivers of Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from iskander.client import Client, ModelDescription
from iskander.engines.addresses import Servers
from iskander.engines.columns import plan_columns, require_cuttable
from iskander.engines.runtimes import common_runtimes
from iskander.engines.scorer import Scorer, ScoreSpec
from iskander.errors import ConfigError
from iskander.lake.rows import require_separable
from iskander.ray import cluster
from iskander.ray.addresses import fixed_servers
from iskander.ray.fleet import Fleet

BATCH_ROWS: Final = 4096
BLOCK_ROWS: Final = 65_536
"""One actor scores a block, and Ray reads small files into one block of up to 128 MiB."""
CALLS: Final = 4
"""Concurrent batches of an actor."""
TASKS_IN_FLIGHT: Final = 6
"""Blocks that are sent to an actor in advance, including blocks in progress."""
MEMORY_BYTES: Final = 512 << 20
"""Memory that Ray reserves for an actor. Ray spreads actors without any reservation at random."""
ON_ERROR: Final = ("fail", "null")


def score(  # noqa: PLR0913 - options of one job, all by keyword
    dataset: Any,  # noqa: ANN401
    model: str,
    target: Fleet | str | Sequence[str] | Mapping[str, str],
    *,
    version: str | None = None,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] | None = None,
    batch_rows: int = BATCH_ROWS,
    block_rows: int | None = BLOCK_ROWS,
    concurrency: int | tuple[int, int] | None = None,
    num_cpus: float = 0.0,
    on_error: str = "fail",
    timeout_s: float = 300.0,
    wait_s: float = 60.0,
    client: Mapping[str, Any] | None = None,
) -> Any:  # noqa: ANN401
    """Return a dataset with the kept columns and the model's results; it is scored when consumed.

    Each actor prefers the server of its node, and uses the other servers while that server is gone.
    A batch may be scored twice after a failure; each row is in the output once.

    Args:
        dataset: A `ray.data.Dataset`.
        model: Name of the model.
        target: A fleet, addresses, or a table of addresses by node id.
        version: Version or alias; None: the server's routing decides, once for all rows.
        columns: Name of the dataset's column for an input's name, where they differ.
        keep: Columns of the dataset in the output; None: all.
        batch_rows: Rows of a batch.
        block_rows: Rows of a block that an actor gets; None: blocks of the dataset as they are.
        concurrency: Number of actors, or (minimum, maximum); None: one to two actors per server.
        num_cpus: CPUs that Ray reserves for each actor; a fraction leaves other tasks no whole CPU.
        on_error: `fail`, or `null` for null results of the rows that the model rejects.
        timeout_s: Timeout of a batch, retries included.
        wait_s: Time for which a batch waits while no server is available.
        client: Options of `iskander.client.Client`, such as `token`.

    Raises:
        ConfigError: An option is invalid, or a column of `keep` is missing.
        ContractError: A column that is known is missing, of another type, or named as a result.
        ModelNotFound: There is no such model or version.
        NotReady: No server is ready, or this process cannot reach one.
        RuntimeDiffers: Servers run the model with different libraries, providers or threads.
    """
    data = cluster.ray().data
    _require_options(data, dataset, on_error, batch_rows=batch_rows, block_rows=block_rows)
    servers, options = _servers_and_options(target, client or {})
    pool = _actor_pool(data, concurrency, len(servers.addresses()))
    description, runtimes = _describe(servers, options, model, version)
    require_separable(on_error, description)
    schema, names = _known_columns(dataset)
    spec = ScoreSpec(
        version=description.version,
        columns=plan_columns(description, schema, names=names, columns=columns, keep=keep),
        renamed=dict(columns or {}),
        servers=servers,
        client=options,
        runtimes=runtimes,
        on_error=on_error,
        timeout_s=timeout_s,
        wait_s=wait_s,
    )
    if block_rows is not None:
        dataset = dataset.repartition(target_num_rows_per_block=block_rows)
    return dataset.map_batches(
        Scorer,
        batch_size=batch_rows,
        batch_format="pyarrow",
        fn_constructor_args=(spec,),
        udf_modifying_row_count=False,
        num_cpus=num_cpus,
        memory=MEMORY_BYTES,
        compute=pool,
    )


def _require_options(
    data: Any,  # noqa: ANN401
    dataset: Any,  # noqa: ANN401
    on_error: str,
    **rows: int | None,
) -> None:
    """Raise `ConfigError` for an option that is invalid."""
    if not isinstance(dataset, data.Dataset):
        raise ConfigError(
            f"`dataset` is of the type {type(dataset).__name__}; expected ray.data.Dataset"
        )
    if on_error not in ON_ERROR:
        raise ConfigError(f"`on_error` is {on_error!r}; expected `fail` or `null`")
    for name, count in rows.items():
        if count is not None and count < 1:
            raise ConfigError(f"`{name}` is {count}; the minimum is 1")


def _servers_and_options(
    target: Fleet | str | Sequence[str] | Mapping[str, str], client: Mapping[str, Any]
) -> tuple[Servers, dict[str, Any]]:
    """Return the servers of a target, and the options of clients."""
    if isinstance(target, Fleet):
        return target.servers(), {"token": target.token, **client}
    return fixed_servers(target), dict(client)


def _describe(
    servers: Servers, options: Mapping[str, Any], model: str, version: str | None
) -> tuple[ModelDescription, dict[str, str]]:
    """Describe the model of all servers; return the description and the terms of the runtimes."""
    addresses = servers.addresses()
    with Client(addresses, **options) as client:
        description = client.model(model, version=version).description
    require_cuttable(description, "Ray", "`map_groups`")
    return description, common_runtimes(description, addresses, options)


def _actor_pool(data: Any, concurrency: int | tuple[int, int] | None, servers: int) -> Any:  # noqa: ANN401
    """Return the pool of actors for a number of servers."""
    if concurrency is None:
        least, most = servers, 2 * servers
    elif isinstance(concurrency, int):
        least = most = concurrency
    else:
        least, most = concurrency
    if not 1 <= least <= most:
        raise ConfigError(
            f"`concurrency` is {concurrency}; expected a number of actors, or (minimum, maximum) "
            "with a minimum of at least 1"
        )
    return data.ActorPoolStrategy(
        min_size=least,
        max_size=most,
        max_tasks_in_flight_per_actor=TASKS_IN_FLIGHT,
        max_concurrent_calls_per_actor=CALLS,
        enable_true_multi_threading=True,
    )


class _KnownColumns(NamedTuple):
    """Columns that are known before the dataset runs: with types, by name only, or not at all."""

    schema: pa.Schema | None
    names: list[str] | None


def _known_columns(dataset: Any) -> _KnownColumns:  # noqa: ANN401
    """Return the columns of a dataset that are known without running the dataset."""
    found = dataset.schema(fetch_if_missing=False)
    if found is None:
        return _KnownColumns(None, None)
    if isinstance(found.base_schema, pa.Schema):
        return _KnownColumns(found.base_schema, None)
    return _KnownColumns(None, list(found.names))
