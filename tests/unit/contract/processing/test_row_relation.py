"""Relation between rows: what each verdict permits, and the manifest's override."""

from __future__ import annotations

import pytest

from iskander.contract.processing.row_relation import (
    INDEPENDENT,
    RowRelation,
    Verdict,
    weaker_relation,
)

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
            assert weaker_relation(*pair).verdict == second
            assert weaker_relation(*reversed(pair)).verdict == second
    assert weaker_relation(INDEPENDENT, INDEPENDENT) is INDEPENDENT


@pytest.mark.parametrize(
    ("relation", "summary"),
    [
        (RowRelation("independent", "8 rows"), "independent"),
        (RowRelation("dependent", "row 3"), "dependent, requests are not combined; row 3"),
        (
            RowRelation("dependent", "row 3", combine=True),
            "dependent, `combine = true` in the manifest; row 3",
        ),
        (
            RowRelation("independent", "8 rows", combine=False),
            "independent, requests are not combined: `combine = false` in the manifest",
        ),
    ],
)
def test_summary(relation: RowRelation, summary: str) -> None:
    assert relation.summary == summary


def test_wire_form_has_the_verdict_and_its_effect() -> None:
    """Clients read it from the contract."""
    assert RowRelation("approximate", "2 %").to_wire() == {
        "verdict": "approximate",
        "evidence": "2 %",
        "combine": None,
        "is_combinable": False,
        "is_whole": False,
        "reason": "its rows are approximate: 2 %",
    }
