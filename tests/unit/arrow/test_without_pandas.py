"""pyarrow without pandas, in a process of its own, because pyarrow looks for it once."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
{first}
import numpy as np, pyarrow as pa
pa.array(np.arange(3)), pa.array([None, 1]), pa.array(np.array(["a"], object))
pa.DictionaryArray.from_arrays(pa.array([], pa.int8()), pa.nulls(1))
assert ("pandas" in sys.modules) is {is_loaded}, "pandas"
import pandas
assert pandas.DataFrame
"""
KEEP_OUT = "from iskander.arrow.without_pandas import keep_pandas_out; keep_pandas_out()"


@pytest.mark.long
def test_conversions_do_not_import_pandas() -> None:
    """Code of users can import it later; without the call the first conversion imports it."""
    for first, is_loaded in ((KEEP_OUT, False), ("", True)):
        program = PROGRAM.format(first=first, is_loaded=is_loaded)
        subprocess.run([sys.executable, "-c", program], check=True)
