"""Columns of a scored dataset: those that are sent, those that are kept, and the results.

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
        inputs: Names in the data of the model's inputs and of the columns it ranks within.
        results: Fields of the results, nullable.
        keep: Columns of the data in the output; None: all.
    """

    model: str
    inputs: tuple[str, ...]
    results: pa.Schema
    keep: tuple[str, ...] | None

    def kept(self, names: Sequence[str]) -> list[str]:
        """Return the kept ones of the data's columns.

        Raises:
            ConfigError: A column of `keep` is missing.
            ContractError: A kept column has the name of a result, or of another one.
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

    def sent(self, names: Sequence[str]) -> list[str]:
        """Return the columns that the model needs, in the order of the data; `a` for `a.b`."""
        wanted = {name if name in names else name.partition(".")[0] for name in self.inputs if name}
        return [name for name in names if name in wanted]


def require_cuttable(description: ModelDescription, engine: str, function: str) -> None:
    """Require a model whose rows an engine may cut into batches.

    Raises:
        ContractError: It takes all rows of a table in one request.
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
    """Plan the columns of a dataset, and check them as far as they are known.

    Args:
        description: The model.
        schema: Columns of the dataset; None: unknown.
        names: Their names, if these are known without types.
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
        sent = set(plan.sent(names))
        # With a column missing, all of them, so that the error can suggest a name.
        is_complete = all(_column(name, names) in names for name in plan.inputs)
        matched = [field for field in schema if field.name in sent or not is_complete]
        Matching(description, pa.schema(matched), columns=given)
    plan.kept(names)
    return plan


def _column(name: str, names: Sequence[str]) -> str:
    """Column of an input: the struct `a` for `a.b`, unless a column has that name."""
    return name if name in names else name.partition(".")[0]


def joined(plan: Columns, kept: pa.Table, results: pa.Table) -> pa.Table:
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
