"""Columns of a scored dataset: sent columns, kept columns, and the results.

Runs in: drivers and processes of engines. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from iskander.client import ModelDescription
from iskander.client.matching import Matching
from iskander.errors import ConfigError, ContractError


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns of the output, and of the input that the model needs.

    Attributes:
        model: Name of the model.
        inputs: Columns of the data that the model reads: its inputs, and the columns that group
            rows for ranks.
        results: Fields of the results, nullable.
        keep: Columns of the data in the output; None: all.
    """

    model: str
    inputs: tuple[str, ...]
    results: pa.Schema
    keep: tuple[str, ...] | None

    def kept_columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the data that the output keeps.

        Raises:
            ConfigError: A column of `keep` is missing.
            ContractError: A kept column has the name of a result, or of another kept column.
        """
        kept = list(names) if self.keep is None else list(self.keep)
        for name in kept:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean `{near[0]}`?" if near else f"; it has {', '.join(names)}"
                raise ConfigError(f"`keep` has `{name}`, which the dataset lacks{hint}")
        self.require_distinct(kept)
        return kept

    def require_distinct(self, kept: Sequence[str]) -> None:
        """Raise `ContractError` if two columns of the output have one name."""
        for name in kept:
            if name in self.results.names:
                raise ContractError(
                    f"column `{name}` is in the dataset and a result of model `{self.model}`; "
                    "rename it, or leave it out with `keep`",
                    column=name,
                    model=self.model,
                )
            if kept.count(name) > 1:
                raise ContractError(
                    f"the output would have two columns `{name}`; rename one, or leave it out with "
                    "`keep`",
                    column=name,
                )

    def sent_columns(self, names: Sequence[str]) -> list[str]:
        """Return the columns of the data with the model's inputs, in order.

        The input `a.b` is in `a`.
        """
        wanted = {name if name in names else name.partition(".")[0] for name in self.inputs if name}
        return [name for name in names if name in wanted]


def require_cuttable(description: ModelDescription, engine: str, function: str) -> None:
    """Require a model whose rows an engine may cut into batches.

    Raises:
        ContractError: The model takes all rows of a table in one request.
    """
    if description.is_whole:
        raise ContractError(
            f"model `{description.name}` takes all rows of a table in one request, because "
            f"{description.whole_reason}; {engine} cuts rows into batches at any place. Score each "
            f"table with `iskander.client.Client` in {function}, or set `combine = true` in the "
            "manifest if the rows are known to be independent",
            model=description.name,
        )


def plan_columns(
    description: ModelDescription,
    schema: pa.Schema | None,
    *,
    names: Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
    keep: Sequence[str] | None = None,
) -> Columns:
    """Plan the columns of a dataset, and check the columns that are known.

    Args:
        description: The model.
        schema: Schema of the dataset; None: unknown.
        names: Names of the dataset's columns, if only the names are known.
        columns: Name of the dataset's column for an input's name, where they differ.
        keep: Columns of the dataset in the output; None: all.

    Raises:
        ConfigError: A column of `keep` is missing.
        ContractError: A column is missing, has a type without a lossless cast, or has the name of
            a result.
    """
    given = dict(columns or {})
    plan = Columns(
        model=description.name,
        inputs=tuple(
            given.get(name, name)
            for name in (*description.input_types, *description.ranked_within)
            if name
        ),
        results=pa.schema([each.with_nullable(True) for each in description.output_schema]),
        keep=None if keep is None else tuple(keep),
    )
    if schema is not None:
        names = schema.names
    if names is None:
        plan.require_distinct(list(plan.keep or ()))
        return plan
    if schema is not None:
        sent = set(plan.sent_columns(names))
        # If a column is missing, match all columns, so that the error can suggest a name.
        is_complete = all(_column_or_struct(name, names) in names for name in plan.inputs)
        matched = [field for field in schema if field.name in sent or not is_complete]
        Matching(description, pa.schema(matched), columns=given)
    plan.kept_columns(names)
    return plan


def _column_or_struct(name: str, names: Sequence[str]) -> str:
    """Return the column of an input: the struct `a` for `a.b`, unless a column is named `a.b`."""
    return name if name in names else name.partition(".")[0]


def join_columns(plan: Columns, kept: pa.Table, results: pa.Table) -> pa.Table:
    """Return the kept columns and the results as one table.

    Raises:
        ContractError: The model returned another number of rows.
    """
    if results.num_rows != kept.num_rows:
        raise ContractError(
            f"model `{plan.model}` returned {results.num_rows:,} rows for {kept.num_rows:,}",
            model=plan.model,
        )
    for field in plan.results:
        kept = kept.append_column(field, results.column(field.name))
    return kept
