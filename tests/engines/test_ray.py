"""A Ray cluster of three nodes on this machine, servers on its nodes, and scored datasets.

The tests are in `ray_cases.py`, `ray_score_cases.py`, `ray_page_cases.py` and `ray_serve_cases.py`.
They run in a network namespace of their own, where Ray uses the loopback address for all nodes, as
root or in a user namespace.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import eventually, processes_of

HERE = Path(__file__).resolve().parent
WITHIN_S = 600.0


@pytest.mark.parametrize(
    "cases", ["ray_cases.py", "ray_score_cases.py", "ray_page_cases.py", "ray_serve_cases.py"]
)
def test_cases_in_a_network_of_their_own(cases: str, tmp_path: Path) -> None:
    """All cases pass, and nothing of the servers is left."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "default"]
    words += ["--durations=0", "--durations-min=0.5", f"--rootdir={HERE.parent.parent}"]
    script = 'ip link set lo up && exec "$@"'
    unshare = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
    process = subprocess.run(
        [*unshare, "sh", "-c", script, "sh", *words, str(HERE / cases)],
        cwd=HERE.parent.parent,
        env={**os.environ, "TMPDIR": str(tmp_path), "RAY_DATA_DISABLE_PROGRESS_BARS": "1"},
        timeout=WITHIN_S,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    sys.stdout.write(process.stdout[-20_000:])
    assert process.returncode == 0
    eventually(lambda: not processes_of(tmp_path), what="the end of all servers")
