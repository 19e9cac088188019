#!/bin/sh
# Resolve all dependencies anew: uv.lock with hashes, and the same versions as constraints for pip.
#   sh scripts/lock.sh            newest allowed versions
#   sh scripts/lock.sh --check    fail if uv.lock does not fit pyproject.toml
set -eu
cd "$(dirname "$0")/.."
if [ "${1:-}" = --check ]; then
    exec uv lock --quiet --check
fi
uv lock --quiet --upgrade
# Without PyTorch: its extras are for single tests, and its release depends on the machine.
uv export --quiet --frozen --all-extras --no-extra torch --no-extra train --no-hashes \
    --no-emit-project --no-annotate --no-header --output-file scripts/constraints.txt
