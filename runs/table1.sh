#!/usr/bin/env bash
# The paper's Table 1, measured: Markdown, JSON and a figure. A few minutes on two cores.
#   runs/table1.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
tisa-lab criteria --variations --out "${1:-docs/records/$(date -u +%F)-table1}"
