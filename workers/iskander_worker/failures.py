"""Conversion of model load exceptions to an `IskanderError`.

A model's files pass through libraries that can raise anything, including a `BaseException`. Only
an assertion of this program ends the worker.

Runs on: worker main, and the processes of sandboxed loads.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import iskander
from iskander.errors import IskanderError, ManifestError
from iskander.foundation.logs import workers as log
from iskander_worker.batches.tensors import error_text

_OWN_PACKAGES = tuple(Path(file).resolve().parent for file in (__file__, iskander.__file__))


def load_error(error: BaseException) -> BaseException:
    """Return the error to report.

    An `IskanderError` or an assertion of this program is returned unchanged. Any other becomes a
    ManifestError with its text; its traceback goes to the log.
    """
    if isinstance(error, IskanderError) or _is_own_assertion(error):
        return error
    log.model_code_failed(error=error)
    kind, text = type(error).__name__, error_text(error)
    return ManifestError(f"it cannot be loaded: {kind if text == kind else f'{kind}: {text}'}")


def _is_own_assertion(error: BaseException) -> bool:
    if not isinstance(error, AssertionError):
        return False
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    file = Path(frames[-1].filename).resolve() if frames else None
    return file is not None and any(file.is_relative_to(folder) for folder in _OWN_PACKAGES)
