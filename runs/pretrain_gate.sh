#!/usr/bin/env bash
# Before any comparison: do `none` and `absolute` differ by more than 5 times the spread over seeds?
#   runs/pretrain_gate.sh        (STEPS=… BATCH_TOKENS=… for another budget; then for the rest too)
. "$(dirname "$0")/pretrain_settings.sh"
"$python" runs/pretrain_grid.py "$work/encoder" --jobs "$jobs" --seconds "$seconds" --collect "$out/encoder.tar.gz" -- $encoder $extra <<'RUNS'
none-0 --position none --seed 0
absolute-0 --position absolute --seed 0
none-1 --position none --seed 1
absolute-1 --position absolute --seed 1
RUNS
"$python" runs/pretrain_report.py gate "$work/encoder" | tee "$out/gate.txt"
