"""What ended a load, as an error with a name.

A model's files pass through libraries that can raise anything, also what is no `Exception`. None of
that is a reason to end a worker; an assertion of this program is.

Runs on: worker main, and the processes that load a model for a look.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import iskander
from iskander.errors import IskanderError, ManifestError
from iskander_worker.tensors import plain

FRAMES_MAX = 20
LOG_CHARACTERS_MAX = 16_000
_OURS = tuple(Path(file).resolve().parent for file in (__file__, iskander.__file__))


def load_error(error: BaseException) -> BaseException:
    """The error to answer a load with: itself where it has a name or is an assertion of ours.

    Of any other the traceback goes to the log, and its words into a ManifestError.
    """
    if isinstance(error, IskanderError) or _is_own_assertion(error):
        return error
    told = traceback.format_exception(error, limit=-FRAMES_MAX, chain=False)
    sys.stderr.write("".join(told)[:LOG_CHARACTERS_MAX])
    sys.stderr.flush()
    kind, words = type(error).__name__, plain(error)
    return ManifestError(f"it cannot be loaded: {kind if words == kind else f'{kind}: {words}'}")


def _is_own_assertion(error: BaseException) -> bool:
    if not isinstance(error, AssertionError):
        return False
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    file = Path(frames[-1].filename).resolve() if frames else None
    return file is not None and any(file.is_relative_to(folder) for folder in _OURS)
