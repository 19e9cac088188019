"""Code blocks of docs/scaling.md by name: their heading, with a number from the second on."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping

from support.models import ROOT

PAGE = (ROOT / "docs" / "scaling.md").read_text("utf-8")
_PART = re.compile(r"^#+ (?P<heading>.+?)\n|^```\w*\n(?P<code>.*?)^```$", re.M | re.S)


def _blocks() -> dict[str, str]:
    found: dict[str, str] = {}
    heading, counts = "", collections.Counter[str]()
    for part in _PART.finditer(PAGE):
        if part["heading"] is not None:
            heading = part["heading"]
            continue
        counts[heading] += 1
        number = counts[heading]
        found[heading if number == 1 else f"{heading} {number}"] = part["code"]
    return found


BLOCKS = _blocks()


def block(name: str, replaced: Mapping[str, str] | None = None) -> str:
    """Return a block with other paths and addresses, each of which it contains."""
    code = BLOCKS[name]
    for text, other in (replaced or {}).items():
        assert text in code, f"{name}: no {text}"
        code = code.replace(text, other)
    return code
