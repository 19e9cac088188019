"""Recognition of log lines, with regular expressions as the reference.

An input is a line. The regular expression of an event's text backtracks for a power of the line's
length, so it is the reference for short lines only.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from random import Random
from typing import Any

import msgspec

from fuzz import mutation
from iskander.foundation.decoders import DECODE_ERRORS
from iskander.foundation.logs.catalog import EVENTS
from iskander.foundation.logs.event import ERROR, Event
from iskander.foundation.logs.formats import TextFormat
from iskander.foundation.logs.recognition import recognize

ITERATIONS = 800
REFERENCE_CHARACTERS_MAX = 200
VALUES: dict[type, Any] = {int: 4711, float: 2.5, str: "a: `b`, was c"}
FIELD = "\N{BLACK SQUARE}"
LOGGER = re.compile(r"(?:\A|[^\w.])(iskander(?:\.\w+)+): ")
LEVEL = re.compile(r"\W([DIWEC]) (?:\[\w+\] )?\Z")
REPEATED = re.compile(r"(.*) \(repeated \d+ times in \d+ s\)", re.S)
WORDS = (
    " ", ": ", "; ", ", ", "`", "(", ")", "{", "[", "}", "\n", "\0", "\ud800", "iskander.", "E ",
    "E [gateway] ", "iskander.supervisor: ", "worker ", " (repeated 3 times in 10 s)", "9" * 5000,
    "worker 3 " * 400, "iskander.a." * 700, '{"a":' * 1500, "[" * 4000, '{"event":"', " s", " of ",
)  # fmt: skip


def seeds() -> list[bytes]:
    lines = [line_of(event) for event in list(EVENTS.values())[::5]]
    lines += [f"host iskander[7]: {line}" for line in lines[:3]]
    lines += [f"{lines[0]} (repeated 3 times in 10 s)", '{"event":"worker_ended"}', '{"event":{}}']
    return [encoded(line) for line in lines]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    if not random.randrange(4):
        return mutation.flip(raw, other, random)
    if not random.randrange(4):
        return encoded(crowded(random.choice(tuple(EVENTS.values())), random))
    line = decoded(raw)
    at = random.randrange(len(line) + 1)
    end = min(at + random.choice((0, 0, 1, 2, 16)), len(line))
    words = (*WORDS, *re.findall(r"\w+|\W+", decoded(other))[: len(WORDS)])
    return encoded(line[:at] + random.choice(words) * random.choice((1, 1, 1, 2, 50)) + line[end:])


def crowded(event: Event[Any], random: Random) -> str:
    """A line with any number of the constant parts of an event's text, in any order."""
    first, *others = text_of(event, FIELD).split(FIELD)
    count = random.choice((0, 1, 2, 3, 4, 1000))
    between = "".join(random.choice([*others, "x"]) for _ in range(count))
    last = random.choice(["", "x", *others[-1:]])
    return f"{event.logger_name}: {first}{between}{last}"


def run(raw: bytes) -> None:
    line = decoded(raw)
    found = recognize(line)
    assert len({id(event) for event in found}) == len(found)
    named = event_of_json(line)
    if named is not None or len(line) > REFERENCE_CHARACTERS_MAX:
        assert named is None or found == [named]
        return
    assert found == expected(line), f"{found}, expected {expected(line)}"


def expected(line: str) -> list[Event[Any]]:
    """Events whose texts have the most constant characters."""
    match = LOGGER.search(line)
    if match is None:
        return []
    level = LEVEL.search(" " + line[: match.start(1)])
    logger, letter, text = match[1], level and level[1], line[match.end() :].partition("\n")[0]
    if repeated := REPEATED.fullmatch(text):
        text = repeated[1]
    fitting = [
        event
        for event in EVENTS.values()
        if event.logger_name == logger
        and letter in (None, logging.getLevelName(event.level)[0])
        and pattern_of(event).fullmatch(text)
    ]
    sizes = [len(text_of(event, FIELD).replace(FIELD, "")) for event in fitting]
    return [event for event, size in zip(fitting, sizes, strict=True) if size == max(sizes)]


def event_of_json(line: str) -> Event[Any] | None:
    """The event of a line that ends with a JSON object."""
    try:
        value = msgspec.json.decode(line[line.index("{") :])
    except DECODE_ERRORS:
        return None
    name = value.get("event")
    return EVENTS.get(name) if isinstance(name, str) else None


@cache
def pattern_of(event: Event[Any]) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text_of(event, FIELD).split(FIELD))))


def text_of(event: Event[Any], mark: str = "") -> str:
    """The text for fields that print `mark`, or for some values."""
    marked = {int: Marked(), float: Marked(), str: mark}
    fields = {name: (marked if mark else VALUES)[kind] for name, kind in event.fields.items()}
    failure = {ERROR: MarkedError() if mark else ValueError("of a model")}
    return event.text(**fields, **(failure if event.has_traceback else {}))


class Marked(int):
    """A number that prints the mark."""

    def __format__(self, spec: str) -> str:
        return FIELD


class MarkedError(Exception):
    """An exception that prints the mark."""

    def __repr__(self) -> str:
        return FIELD

    __str__ = __repr__


MarkedError.__name__ = FIELD


def line_of(event: Event[Any]) -> str:
    text = text_of(event)
    record = logging.LogRecord(event.logger_name, event.level, "", 0, text, None, None)
    return TextFormat().format(record)


def encoded(line: str) -> bytes:
    return line.encode(errors="surrogatepass")


def decoded(raw: bytes) -> str:
    return raw.decode(errors="surrogateescape")
