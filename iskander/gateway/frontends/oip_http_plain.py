"""Messages of the Open Inference Protocol as JSON has them over HTTP.

Every field is there under its own name, set or not, and numbers of 64 bits are numbers; protobuf's
own JSON has neither. Pure.

Source: Open Inference Protocol v2, REST; protobuf's descriptors.
"""

from __future__ import annotations

from typing import Any


def plain(message: Any) -> dict[str, Any]:  # noqa: ANN401
    """A message as plain values; a message within it that was not set is left out."""
    return {
        field.name: _value(getattr(message, field.name), field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _value(value: Any, field: Any) -> Any:  # noqa: ANN401
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        entry = kind.fields_by_name["value"]
        return {key: _single(each, entry) for key, each in value.items()}
    return [_single(each, field) for each in value] if field.is_repeated else _single(value, field)


def _single(value: Any, field: Any) -> Any:  # noqa: ANN401
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
