"""Generates `iskander/_generated/*_pb2.py` from `scripts/protos/*.proto`.

Needs grpcio-tools 1.73.

The messages of the tests are generated from `tests/interop/protos` in the same way.

grpcio-tools writes modules for protobuf 6, which the runtimes 6 and 7 both accept. Messages of the
server are registered in a private pool: clients of the same protocols bring modules with the same
names, and the runtime fails if both are registered in its default pool.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "iskander" / "_generated"
TARGETS = {
    TARGET: ROOT / "scripts" / "protos",
    ROOT / "tests" / "support" / "generated": ROOT / "tests" / "interop" / "protos",
}
"""Target folder of the generated modules, and folder of their sources."""
OWN_POOL = {
    "from google.protobuf import descriptor_pool as _descriptor_pool": (
        "from iskander._generated import POOL as _POOL"
    ),
    "_descriptor_pool.Default()": "_POOL",
}


def generate(sources: Path, target: Path, *, has_own_pool: bool) -> None:
    """Write a module and its type stub for each source file into `target`."""
    from grpc_tools import protoc

    files = [str(path) for path in sorted(sources.glob("*.proto"))]
    arguments = ["protoc", f"-I{sources}", f"--python_out={target}", f"--pyi_out={target}", *files]
    if protoc.main(arguments):
        sys.exit("protoc failed")
    if not has_own_pool:
        return
    for path in sorted(target.glob("*_pb2.py")):
        text = path.read_text()
        for default, private in OWN_POOL.items():
            assert default in text, f"{path.name} does not contain `{default}`"
            text = text.replace(default, private)
        path.write_text(text)


def main() -> None:
    """Generate the modules, or with `--check` exit 1 if one is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only compare with the committed files"
    )
    is_check = parser.parse_args().check
    stale = []
    for committed, sources in TARGETS.items():
        has_own_pool = committed == TARGET
        if not is_check:
            generate(sources, committed, has_own_pool=has_own_pool)
            continue
        with tempfile.TemporaryDirectory() as folder:
            generate(sources, Path(folder), has_own_pool=has_own_pool)
            stale += [
                path.name
                for path in sorted(Path(folder).iterdir())
                if path.read_bytes() != (committed / path.name).read_bytes()
            ]
    if stale:
        sys.exit(f"stale files: {', '.join(stale)}; run scripts/gen_proto.py")


if __name__ == "__main__":
    main()
