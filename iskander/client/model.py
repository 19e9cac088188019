"""A model of a server: its contract as schemas, and calls bound to its name.

Runs on: the caller's threads. Pure, except for the calls of the client.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

import pyarrow as pa

from iskander.errors import LimitExceeded, ProtocolError


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelDescription:
    """A model version as its server describes it; hashed by identity, as a key of a cache.

    Attributes:
        name: Name of the model.
        version: Described version.
        ready: Whether the version has its workers.
        backend: Backend that runs the model.
        max_batch_rows: Rows of a worker's batch.
        limits: Limits of a client's batch: `rows`, `bytes`, `string_bytes`.
        versions: Served versions of the model, lowest first.
        aliases: Version of each alias.
        input_schema: Columns of a batch that the model needs. If an input accepts several types,
            its column has the type with the least conversion.
        output_schema: Result columns, without columns that are passed through.
        input_types: Declared type of each input column, such as `number`; `a.b` is a field of the
            struct `a`.
        passthrough: Columns that are returned: `all`, `none`, or names.
        ranked_within: For each rank among the results, the column whose values are the groups; an
            empty name: all rows of a batch are one group.
        row_relation: Whether a row's result depends on the other rows of its batch: `independent`,
            `approximate`, `dependent` or `undecided`.
        is_whole: All rows of a table must be one batch, because of the relation or the manifest.
        whole_reason: Why all rows must be one batch.
        metadata: All keys of the contract, as the server sends them.
    """

    name: str
    version: str
    ready: bool
    backend: str
    max_batch_rows: int
    limits: Mapping[str, int]
    versions: tuple[str, ...]
    aliases: Mapping[str, str]
    input_schema: pa.Schema
    output_schema: pa.Schema
    input_types: Mapping[str, str]
    passthrough: str | tuple[str, ...]
    ranked_within: tuple[str, ...]
    metadata: Mapping[str, Any]
    row_relation: str = "independent"
    is_whole: bool = False
    whole_reason: str = ""

    @property
    def cut_terms(self) -> dict[str, str]:
        """Terms of batches that are parts of a table; a server may reject parts by these terms."""
        return {"cut": "true"} if "rows" in self.metadata and not self.is_whole else {}

    @property
    def rows_setting(self) -> str:
        """Setting that limits the rows of a batch that must not be cut."""
        is_own = self.is_whole and self.limits["rows"] == self.max_batch_rows
        return "models.max_batch_rows" if is_own else "limits.rows"

    def whole_error(self, error: LimitExceeded) -> LimitExceeded:
        """Return the error of a table that is too large for the one batch that it needs."""
        if not self.is_whole:
            text = f"model `{self.name}` ranks all rows of a batch: {error.message}"
        else:
            text = (
                f"model `{self.name}` takes all rows of a table in one batch: {error.message}, "
                f"because {self.whole_reason}. Send a smaller table, raise the limit, or set "
                "`combine = true` in the manifest if the rows are known to be independent"
            )
        return LimitExceeded(text, **error.fields)


def read_description(results: Sequence[bytes]) -> ModelDescription:
    """Decode the results of the action `contract`.

    Raises:
        ProtocolError: The results are not a contract; the server may be of another version.
    """
    try:
        described, inputs, outputs = results
        contract = json.loads(described)
        passthrough = contract["passthrough"]
        # Servers before 0.2 do not send the key `rows`.
        relation = contract.get("rows", {"verdict": "independent"})
        return ModelDescription(
            name=contract["name"],
            version=contract["version"],
            ready=contract["ready"],
            backend=contract["backend"],
            max_batch_rows=contract["max_batch_rows"],
            limits=contract["limits"],
            versions=tuple(contract["versions"]),
            aliases=contract["aliases"],
            input_schema=_read_schema(inputs),
            output_schema=_read_schema(outputs),
            input_types=_input_types(contract["inputs"]),
            passthrough=passthrough if isinstance(passthrough, str) else tuple(passthrough),
            ranked_within=tuple(contract["ranked_within"]),
            metadata=contract,
            row_relation=relation["verdict"],
            is_whole=relation.get("is_whole", False),
            whole_reason=relation.get("reason", ""),
        )
    except (ValueError, LookupError, TypeError, OSError) as error:
        text = f"the server's contract cannot be read: {type(error).__name__} {error}"
        raise ProtocolError(f"{text}; it may be of another version") from None


def _read_schema(message: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(message))


def _input_types(entries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    types: dict[str, str] = {}
    for entry in entries:
        for name in entry.get("columns") or [entry["column"]]:
            types.setdefault(name, entry["type"])
    return types


class Calls(Protocol):
    """The calls of a client that `Model` uses: results, or awaitables of an `AsyncClient`."""

    def score(
        self,
        model: str,
        data: Any,  # noqa: ANN401
        *,
        version: str | None,
        columns: Mapping[str, str] | None,
        timeout_s: float | None,
        terms: Mapping[str, Any] | None,
    ) -> Any:  # noqa: ANN401
        """Score a table."""

    def stream(
        self,
        model: str,
        batches: Any,  # noqa: ANN401
        *,
        version: str | None,
        terms: Mapping[str, Any] | None,
        timeout_s: float | None,
        resume: bool,
    ) -> Any:  # noqa: ANN401
        """Score a stream of batches."""

    def outcomes(
        self,
        model: str,
        batches: Any,  # noqa: ANN401
        *,
        version: str | None,
        terms: Mapping[str, Any] | None,
        timeout_s: float | None,
        resume: bool,
    ) -> Any:  # noqa: ANN401
        """Score a stream of batches, with errors of batches in place of results."""


class Model:
    """A model of a server, with the calls of a client.

    The description does not change after the object was made.

    Args:
        client: Client of the server.
        description: The model's description.
        version: Version or alias of all calls; None: the server's routing decides.
    """

    def __init__(
        self, client: Calls, description: ModelDescription, *, version: str | None = None
    ) -> None:
        self._client = client
        self._version = version
        self.description = description

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.description.name

    @property
    def input_schema(self) -> pa.Schema:
        """Columns of a batch that the model needs."""
        return self.description.input_schema

    @property
    def output_schema(self) -> pa.Schema:
        """Result columns, without columns that are passed through."""
        return self.description.output_schema

    @property
    def versions(self) -> tuple[str, ...]:
        """Served versions, lowest first."""
        return self.description.versions

    @property
    def aliases(self) -> Mapping[str, str]:
        """Version of each alias."""
        return self.description.aliases

    @property
    def metadata(self) -> Mapping[str, Any]:
        """All keys of the contract, as the server sends them."""
        return self.description.metadata

    def score(
        self,
        data: Any,  # noqa: ANN401
        *,
        columns: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        terms: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Score a table; see `Client.score`."""
        return self._client.score(
            self.name,
            data,
            version=self._version,
            columns=columns,
            timeout_s=timeout_s,
            terms=terms,
        )

    def stream(
        self,
        batches: Any,  # noqa: ANN401
        *,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        resume: bool = True,
    ) -> Any:  # noqa: ANN401
        """Score a stream of batches; see `Client.stream`."""
        return self._client.stream(
            self.name,
            batches,
            version=self._version,
            terms=terms,
            timeout_s=timeout_s,
            resume=resume,
        )

    def outcomes(
        self,
        batches: Any,  # noqa: ANN401
        *,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        resume: bool = True,
    ) -> Any:  # noqa: ANN401
        """Score a stream of batches; see `Client.outcomes`."""
        return self._client.outcomes(
            self.name,
            batches,
            version=self._version,
            terms=terms,
            timeout_s=timeout_s,
            resume=resume,
        )

    def __repr__(self) -> str:
        rows = [(kind, f"{name}: {type_}") for kind, name, type_ in self._rows()]
        return "\n".join([self._title(), *(f"  {kind:<6} {text}" for kind, text in rows)])

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._rows())
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        head = "<tr><th></th><th>column</th><th>type</th></tr>"
        caption = f"<caption>{escape(self._title())}</caption>"
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"

    def _title(self) -> str:
        model = self.description
        aliases = "".join(f", {name} = {version}" for name, version in model.aliases.items())
        state = "ready" if model.ready else "not ready"
        served = f"versions {', '.join(model.versions)}{aliases}"
        return f"Model {model.name}, version {model.version} ({model.backend}, {state}; {served})"

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return the direction, name and type of each column."""
        model = self.description
        rows = [("input", name, declared) for name, declared in model.input_types.items()]
        rows += [("output", field.name, str(field.type)) for field in model.output_schema]
        if model.passthrough != "none":
            listed = model.passthrough
            names = "all other columns" if isinstance(listed, str) else ", ".join(listed)
            rows.append(("output", names, "as sent"))
        return rows
