"""What a manifest says to the backend that runs its model, as written.

Read together with the rest of the manifest (`manifest`).
"""

from __future__ import annotations

from typing import Any

import msgspec


class PythonPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[python]` of a manifest.

    Attributes:
        file: A file, or the folder of a package, inside the model's folder.
        class_name: The class in it; `class` in the manifest.
        settings: For the class to read; nobody else does.
    """

    file: str = "model.py"
    class_name: str = msgspec.field(default="Model", name="class")
    settings: dict[str, Any] = {}


class GraphPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[graph]` of a manifest: tensors of a model that says nothing of itself, by name.

    Those that are columns as they are need not be declared. Types are spelled as those of columns.
    """

    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
