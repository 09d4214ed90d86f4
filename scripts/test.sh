#!/usr/bin/env bash
# Runs every test not marked slow; arguments go to pytest (-m slow runs the others).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
