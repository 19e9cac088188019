"""What a model file declares about itself.

Source: ONNX IR shapes.
"""

from __future__ import annotations

import msgspec

Dimension = int | str | None


class GraphTensor(msgspec.Struct, frozen=True, array_like=True):
    """An input or output as the graph declares it; a dimension is a size, a symbol or unknown."""

    name: str
    element: str
    shape: tuple[Dimension, ...]


class Graph(msgspec.Struct, frozen=True, array_like=True):
    """What a model file declares about itself."""

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
