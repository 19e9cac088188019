"""What a manifest says to the backend that runs its model, as written.

Read together with the rest of the manifest (`manifest`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

STEPS_MAX = 32


class PythonSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[python]` of a manifest.

    Attributes:
        file: A file, or the folder of a package, inside the model's folder.
        class_name: The class in it; `class` in the manifest.
        settings: For the class to read; nobody else does.
    """

    file: str = "model.py"
    class_name: str = msgspec.field(default="Model", name="class")
    settings: dict[str, Any] = {}


class TorchSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[torch]` of a manifest.

    Attributes:
        file: A program of `torch.export` (`.pt2`), or TorchScript, inside the model's folder.
        weights: A safetensors file whose tensors take the place of the program's.
        outputs: Names of its results, in order; without them those of the manifest's tensors.
    """

    file: str = "model.pt2"
    weights: str = ""
    outputs: tuple[str, ...] = ()


class GraphSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[graph]` of a manifest: tensors of a model that says nothing of itself, by name.

    Those that are columns as they are need not be declared. Types are spelled as those of columns.

    Attributes:
        inputs: What it takes.
        outputs: What it makes.
    """

    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}


class PipelineStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[steps]]` of a manifest.

    Attributes:
        name: For people, and for what is measured.
        model: Its model file or folder, inside the pipeline's.
        backend: What runs it.
        inputs: Its model's names of tensors to the pipeline's, where they differ.
        outputs: The same of what it makes.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
    model: str
    backend: str = "onnx"
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}


Steps = Annotated[tuple[PipelineStep, ...], msgspec.Meta(max_length=STEPS_MAX)]
