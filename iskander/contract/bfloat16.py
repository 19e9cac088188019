"""Rounding of float32 to bfloat16, whose bits are uint16.

Pure. Runs on: gateway and workers.
"""

from __future__ import annotations

from typing import Final

import numpy as np

BFLOAT16_NAN: Final = 0x7FC0


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    wide = np.ascontiguousarray(values, np.float32)
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), np.uint32(BFLOAT16_NAN), rounded).astype(np.uint16)
