#!/bin/sh
# Make .venv and install this checkout into it, editable: with uv where it is there, else with pip.
#   PYTHON=python3.12 sh scripts/setup.sh '.[test]'
set -eu
python=${PYTHON:-python3}
if command -v uv >/dev/null 2>&1; then
    [ -d .venv ] || uv venv --quiet --python "$python" .venv
    uv pip install --quiet --python .venv/bin/python -e "$1"
else
    [ -d .venv ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e "$1"
fi
