"""Table of ONNX's backend suite: classes of verdicts, and the generated section of the page."""

from __future__ import annotations

from collections import Counter

import pytest
from onnx_suite import table
from onnx_suite.comparison import SHAPE, Verdict


def verdict(**fields: object) -> Verdict:
    return Verdict("test_x", "node", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({"answers": 3}, table.RIGHT),
        ({"answers": 3, "is_random": True}, table.FORMS),
        ({"refused": {"Flight": ("inexpressible", "")}}, table.COLUMNS),
        ({"refused": {"together": ("contract", "")}}, table.RIGHT),
        ({"load_error": "input `x` is a scalar and"}, f"refused at load: {table.AT_LOAD[0][1]}"),
        (
            {"load_error": "`model.onnx` cannot be loaded: [..]", "runtime_error": "[..]"},
            f"refused at load: {table.RUNTIME}",
        ),
        ({"load_error": "`model.onnx` cannot be loaded: [..]"}, "refused at load: other: "),
        ({"runtime_error": "x", "refused": {"gRPC": ("contract", "x")}}, table.RUNTIME_RUN),
        ({"refused": {"gRPC": ("execution_failed", SHAPE)}}, f"request refused: {SHAPE}"),
        ({"refused": {"gRPC": ("contract", "x")}}, "request refused: other: contract: x"),
        ({"wrong": ["x"], "refused": {"gRPC": ("contract", "x")}}, table.WRONG),
        ({"internal": ["x"]}, table.INTERNAL),
        ({"crashed": ["x"], "wrong": ["x"]}, table.CRASHED),
    ],
)
def test_row_of_a_verdict(fields: dict[str, object], row: str) -> None:
    """The worst of a case's verdicts; a reason without a class is named."""
    found = table.row_of(verdict(**fields))
    assert found.startswith(row) if row.endswith(": ") else found == row
    is_good = row not in table.BAD and table.UNKNOWN not in row
    assert table.summarize([verdict(**fields)], ("1", "2")).is_good == is_good


def test_rendered_summary_can_be_read() -> None:
    counts = Counter({(table.RIGHT, "node"): 1234, (f"request refused: {SHAPE}", "real"): 2})
    summary = table.Summary(("1.2.3", "4.5"), counts, 3702, 99)
    text = table.render(summary)
    found = table.parse(text)
    assert +found.counts == counts
    assert (found.versions, found.alone, found.together) == (("1.2.3", "4.5"), 3702, 99)
    assert table.render(found) == text


def test_section_of_the_page_is_generated() -> None:
    """The table is one that the suite wrote, of all kinds, without wrong results."""
    section = table.section(table.PAGE.read_text("utf-8"))
    summary = table.parse(section)
    assert table.render(summary) == section
    assert summary.is_good
    assert {kind for (_, kind), count in summary.counts.items() if count} == set(table.KINDS)
