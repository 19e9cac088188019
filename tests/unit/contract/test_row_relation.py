"""Relation between rows: what each verdict permits, and the manifest's override."""

from __future__ import annotations

import pytest

from iskander.contract.row_relation import INDEPENDENT, RowRelation, Verdict, weakest

VERDICTS: tuple[Verdict, ...] = ("independent", "approximate", "undecided", "dependent")


@pytest.mark.parametrize(
    ("verdict", "is_combinable", "is_whole"),
    [
        ("independent", True, False),
        ("approximate", False, False),
        ("undecided", False, True),
        ("dependent", False, True),
    ],
)
def test_verdict(verdict: Verdict, is_combinable: bool, is_whole: bool) -> None:
    """Only independent rows are combined; a request of dependent or unknown rows is one run."""
    relation = RowRelation(verdict, "")
    assert relation.is_combinable is is_combinable
    assert relation.is_whole is is_whole


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("combine", [True, False])
def test_manifest_overrides(verdict: Verdict, combine: bool) -> None:
    """`combine` decides, whatever was measured; the reason names both."""
    relation = RowRelation(verdict, "8 rows", combine=combine)
    assert relation.is_combinable is combine
    assert relation.is_whole is not combine
    assert f"combine = {str(combine).lower()}" in relation.reason
    assert verdict in relation.reason


def test_unmeasured_rows_are_not_combined() -> None:
    """A relation without a measurement permits nothing."""
    assert not RowRelation().is_combinable
    assert RowRelation().is_whole


def test_weakest_of_two_measurements() -> None:
    """Workers may disagree, such as on different processors: the lane obeys the stricter one."""
    for index, first in enumerate(VERDICTS):
        for second in VERDICTS[index:]:
            pair = RowRelation(first, "first"), RowRelation(second, "second")
            assert weakest(*pair).verdict == second
            assert weakest(*reversed(pair)).verdict == second
    assert weakest(INDEPENDENT, INDEPENDENT) is INDEPENDENT
