"""Names in the table of tests that run over both channels."""

from __future__ import annotations

import ast
from pathlib import Path

import conftest
import pytest

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("module", conftest.CHANNEL_TESTS)
def test_modules_and_tests_of_the_table_exist(module: str) -> None:
    (file,) = [*TESTS.glob(f"process/{module}.py"), *TESTS.glob(f"system/{module}.py")]
    tree = ast.parse(file.read_text("utf-8"))
    functions = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    assert set(conftest.CHANNEL_TESTS[module]) <= functions
