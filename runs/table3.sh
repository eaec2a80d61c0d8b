#!/usr/bin/env bash
# The paper's Table 3: ALBERT base v2 on eight tasks of GLUE, with and without its positions, S = 0, 1, 3, 5, five seeds.
#   runs/table3.sh OUT [options of `tisa-lab glue`, such as --data-dir GLUE --executor pool --workers 4, --dry-run]
# 320 runs; MODEL names another model or a folder. Kill it and start it again as you like; start it on several machines
# that share OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?runs/table3.sh OUT [options]}
shift
tisa-lab() { "${PYTHON:-.venv/bin/python}" -c "from tisa_lab.cli import main; main()" "$@"; }
status=0
tisa-lab glue "${MODEL:-albert/albert-base-v2}" --out "$out" "$@" || status=$?
if [ -f "$out/records.jsonl" ]; then
  tisa-lab report "$out" --out "$out/report"
fi
exit "$status"
