"""Declaration of log events: name, level, typed fields, text, meaning and advice.

An event is a function whose keyword parameters are its fields, whose docstring is its meaning, and
whose result is its text:

    @supervisor.error(subject="worker")
    def worker_hung(*, worker: int, silent_ms: int) -> str:
        \"\"\"A worker sent no heartbeat.

        Do: See its stack in the log.
        \"\"\"
        return f"worker {worker} hangs: no heartbeat for {silent_ms} ms"

The decorated name logs it: `worker_hung(worker=3, silent_ms=30_000)`. Type checkers know the fields
of each call. A parameter `error` is no field: its traceback is logged with the text.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

TEXT_MAX = 4000
"""Characters of a text and of a field; load errors of models can be long."""
ADVICE = "\n\nDo: "
ERROR = "error"

P = ParamSpec("P")
FieldT = TypeVar("FieldT", int, float, str)


class Event(Generic[P]):
    """A declared event; call it with its fields to log it.

    Attributes:
        name: Unique, and stable between versions.
        level: Level of the standard library's `logging`.
        topic: Subject of the change of state that it reports, for the event stream; may be empty.
        subject: Fields that identify the subject: repeats of it are limited.
        fields: Type of each field.
        text: Returns the text for values of the fields.
        has_traceback: The event is logged with the traceback of an exception.
        meaning: Explains the event.
        advice: What the operator does about it; may be empty.
    """

    def __init__(
        self,
        text: Callable[P, str],
        logger: logging.Logger,
        level: int,
        *,
        topic: str = "",
        subject: tuple[str, ...] = (),
    ) -> None:
        hints = get_type_hints(text)
        self.has_traceback = hints.pop(ERROR, None) is not None
        self.fields: dict[str, type] = {key: hints[key] for key in hints if key != "return"}
        self.name = text.__name__
        self.level, self.topic, self.subject = level, topic, subject
        self.logger_name = logger.name
        meaning, _, advice = (inspect.getdoc(text) or "").partition(ADVICE)
        self.meaning, self.advice = " ".join(meaning.split()), " ".join(advice.split())
        self._logger, self.text = logger, text

    def __call__(self, *no_fields: P.args, **fields: P.kwargs) -> None:
        """Log the event."""
        if not self._logger.isEnabledFor(self.level):
            return
        text = self.text(*no_fields, **fields)
        logged: dict[str, Any] = dict(fields)
        error = logged.pop(ERROR, None)
        known = {key: _bounded(value) for key, value in logged.items()}
        extra = {"log_event": self, "log_fields": known}
        self._logger.log(self.level, _bounded(text), exc_info=error, extra=extra)


EVENTS: dict[str, Event[Any]] = {}
"""Every event of the imported modules, by name."""


class Source:
    """Declares the events of one logger; `topic` is that of its events.

    The arguments of each decorator are the event's `subject`.
    """

    def __init__(self, logger: str, topic: str = "") -> None:
        self._logger = logging.getLogger(logger)
        self._topic = topic

    def info(self, *subject: str) -> Callable[[Callable[P, str]], Event[P]]:
        """Declare an event that needs no action."""
        return self._at(logging.INFO, subject)

    def warning(self, *subject: str) -> Callable[[Callable[P, str]], Event[P]]:
        """Declare an event that may need an action."""
        return self._at(logging.WARNING, subject)

    def error(self, *subject: str) -> Callable[[Callable[P, str]], Event[P]]:
        """Declare a failure."""
        return self._at(logging.ERROR, subject)

    def _at(self, level: int, subject: tuple[str, ...]) -> Callable[[Callable[P, str]], Event[P]]:
        def declare(text: Callable[P, str]) -> Event[P]:
            event = Event(text, self._logger, level, topic=self._topic, subject=subject)
            assert event.name not in EVENTS, event.name
            EVENTS[event.name] = event
            return event

        return declare


def _bounded(value: FieldT) -> FieldT:
    if isinstance(value, str) and len(value) > TEXT_MAX:
        return value[: TEXT_MAX - 3] + "..."
    return value
