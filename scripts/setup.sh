#!/bin/sh
# Make an environment and install this checkout into it, editable, in the locked versions: with uv if
# it is installed, else with pip. The environment is .venv, or VENV.
#   PYTHON=python3.12 sh scripts/setup.sh '.[test]'
set -eu
python=${PYTHON:-python3}
venv=${VENV:-.venv}
if command -v uv >/dev/null 2>&1; then
    [ -d "$venv" ] || uv venv --quiet --python "$python" "$venv"
    uv pip install --quiet --python "$venv/bin/python" -c scripts/constraints.txt -e "$1"
else
    [ -d "$venv" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c scripts/constraints.txt -e "$1"
fi
