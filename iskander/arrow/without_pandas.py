"""Use of pyarrow without pandas, which its first conversion of a Python object imports.

The import takes 150 ms, during which no other thread runs Python, and 30 MiB. The server passes no
pandas objects. Code of users in the same process can still import pandas.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

PANDAS = "pandas"


class _NoPandas(MetaPathFinder):
    """Import finder that raises `ModuleNotFoundError` for pandas."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Raise `ModuleNotFoundError` for pandas; otherwise leave it to the other finders."""
        del path, target
        if fullname == PANDAS:
            raise ModuleNotFoundError(fullname, name=fullname)


def keep_pandas_out() -> None:
    """Make pyarrow find no pandas; pyarrow looks for it only once.

    A program that has already imported pandas and embeds a gateway keeps pandas.
    """
    if PANDAS in sys.modules:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow as pa

        pa.array([0])
    finally:
        sys.meta_path.remove(finder)
