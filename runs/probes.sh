#!/usr/bin/env bash
# Five tasks about places, ten methods, at 1, 2, 4 and 8 times the training length: JSON, Markdown, a figure.
#   runs/probes.sh [FOLDER]      Some ten minutes on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
PYTHONPATH="$PWD:$PWD/lab" "$python" -m tisa_lab.cli probes --out "${1:-docs/records/$(date -u +%F)-probes}"
