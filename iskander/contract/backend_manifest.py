"""Manifest tables that configure a backend: `[python]`, `[torch]`, `[graph]`, `[[steps]]`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

STEPS_MAX = 32


class PythonSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[python]` of a manifest.

    Attributes:
        file: Python file, or the folder of a package, in the model's folder.
        class_name: Class to instantiate; `class` in the manifest.
        settings: Settings that only the class reads.
    """

    file: str = "model.py"
    class_name: str = msgspec.field(default="Model", name="class")
    settings: dict[str, Any] = {}


class TorchSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[torch]` of a manifest.

    Attributes:
        file: Program of `torch.export` (`.pt2`), or TorchScript, in the model's folder.
        weights: Safetensors file whose tensors replace those of the program.
        outputs: Names of the results, in order; by default those of the manifest's tensors.
    """

    file: str = "model.pt2"
    weights: str = ""
    outputs: tuple[str, ...] = ()


class GraphSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[graph]` of a manifest: tensors of a model whose files declare none, by name.

    A tensor that is a column without conversion needs no entry. Types are spelled as for columns.

    Attributes:
        inputs: Types of the inputs.
        outputs: Types of the outputs.
    """

    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}


class PipelineStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[steps]]` of a manifest.

    Attributes:
        name: Name in errors and metrics.
        model: Model file or folder, in the pipeline's folder.
        backend: Backend that runs the model.
        inputs: Tensor names of the model to those of the pipeline, where they differ.
        outputs: The same mapping for the outputs.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
    model: str
    backend: str = "onnx"
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}


Steps = Annotated[tuple[PipelineStep, ...], msgspec.Meta(max_length=STEPS_MAX)]
