#!/usr/bin/env bash
# Experiment (iv): BERT's schedule, 128 tokens for 90 % of the steps and 512 for the rest, beside 512 all the time.
#   runs/pretrain_schedule.sh
. "$(dirname "$0")/pretrain_settings.sh"
"$python" runs/pretrain_grid.py "$work/schedule" --jobs "$jobs" --seconds "$seconds" --collect "$out/schedule.tar.gz" -- $encoder $extra <<'RUNS'
absolute-schedule-0 --position absolute --lengths 128:0.9,512:0.1 --seed 0
absolute-512-0 --position absolute --lengths 512 --seed 0
tisa-schedule-0 --position tisa --lengths 128:0.9,512:0.1 --seed 0
tisa-512-0 --position tisa --lengths 512 --seed 0
RUNS
"$python" runs/pretrain_report.py report "$work/schedule" --out "$work/report/schedule" || true
