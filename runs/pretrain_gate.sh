#!/usr/bin/env bash
# Before any comparison: do `none` and `absolute` differ by more than 5 times the spread over seeds?
#   runs/pretrain_gate.sh        (STEPS=… BATCH_TOKENS=… for another budget; then for the rest too)
. "$(dirname "$0")/pretrain_settings.sh"
train encoder $encoder --seeds 2 --position none,absolute
"$python" runs/pretrain_report.py gate "$work/encoder" | tee "$out/gate.txt"
