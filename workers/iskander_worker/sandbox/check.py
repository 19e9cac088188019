"""Loads a model once and releases it, without a gateway, for `iskander check`.

The `ModelSpec` arrives on standard input, the answer goes to standard output; output of the model's
code goes to standard error.

Runs on: a process of its own.
"""

from __future__ import annotations

import os
import sys

import msgspec

from iskander.errors import IskanderError
from iskander.interprocess.control.messages import Loaded, LoadFailed, ModelSpec, encode
from iskander_worker.failures import load_error
from iskander_worker.session import Session


def run_check(cores: int) -> None:
    """Load the model on `cores` physical cores and write the answer."""
    answer_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    spec = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ModelSpec)
    try:
        answer: Loaded | LoadFailed = check_load(spec, cores)
    except IskanderError as failure:
        answer = LoadFailed(spec.key, failure.code, failure.message)
    os.write(answer_fd, encode([answer]))


def check_load(spec: ModelSpec, cores: int) -> Loaded:
    """Load, warm up, measure and release a model, or raise an `IskanderError`."""
    try:
        session = Session(spec, cores)
        session.warm_up(spec.rows_max)
        session.measure(is_confined=False)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise load_error(error) from None
    loaded = Loaded(
        spec.key,
        session.contract,
        session.providers,
        session.threads,
        0.0,
        rows=session.relation,
    )
    session.close()
    return loaded
