#!/usr/bin/env bash
# Makes .venv and installs this package with its test tools; does nothing when that is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.installed
if [[ -x .venv/bin/python && $stamp -nt pyproject.toml ]]; then
    exit 0
fi

recent='import sys; sys.exit(sys.version_info < (3, 11))'
if [[ ! -x .venv/bin/python ]]; then
    for python in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
        if command -v "$python" >/dev/null && "$python" -c "$recent"; then
            echo "setup: making .venv with $("$python" --version)"
            "$python" -m venv .venv
            break
        fi
    done
fi
if [[ ! -x .venv/bin/python ]]; then
    echo "setup: found no Python 3.11 or newer; install one or name it: PYTHON=/path/to/python" >&2
    exit 1
fi

echo "setup: installing torchtitan-zephon and what it needs into .venv (torch is large)"
.venv/bin/python -m pip install --quiet -e '.[test]'
touch "$stamp"
