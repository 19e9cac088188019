"""Limits of one batch to one model, for clients that cut their data.

Pure. Runs on: gateway loop.
"""

from __future__ import annotations

from bisect import bisect_right

from iskander.config.auth import GrantLimits
from iskander.config.schema import LimitsConfig
from iskander.contract.tensors import Contract, body_layout
from iskander.gateway.auth.quota import NO_LIMITS


def batch_limits(
    contract: Contract,
    limits: LimitsConfig,
    own: GrantLimits = NO_LIMITS,
    rows_max: int | None = None,
) -> dict[str, int]:
    """Return the maximum rows, bytes and string bytes of a batch of a grant with limits `own`.

    Rows are at most `rows_max`, if each batch must be one run. They are fewer than `limits.rows` if
    the tensors of so many rows exceed `limits.bytes`, which padded lists do, or if their results
    exceed `limits.result_bytes`. At least one.
    """

    def excess(rows: int) -> bool:
        tensor_bytes = sum(spec.buffer_bytes(rows) for spec in contract.inputs)
        result_bytes = body_layout(contract.outputs, rows)[1]
        return tensor_bytes > limits.bytes or result_bytes > limits.result_bytes

    rows = bisect_right(range(1, limits.rows + 1), x=False, key=excess)
    rows = min(rows, own.batch_rows or rows, own.outstanding_rows or rows, rows_max or rows)
    size = min(limits.bytes, own.batch_bytes or limits.bytes)
    return {"rows": max(rows, 1), "bytes": size, "string_bytes": min(limits.string_bytes, size)}
