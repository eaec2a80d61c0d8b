#!/usr/bin/env bash
# Experiment (iii): where scores are needed: first layer, shared by all, one per layer (tisa-0 of the encoder's runs).
#   runs/pretrain_where.sh
. "$(dirname "$0")/pretrain_settings.sh"
"$python" runs/pretrain_grid.py "$work/where" --jobs "$jobs" --seconds "$seconds" --collect "$out/where.tar.gz" -- $encoder $extra <<'RUNS'
tisa-first-0 --position tisa --position-options '{"layers": "first"}' --seed 0
tisa-shared-0 --position tisa --position-options '{"layers": "shared"}' --seed 0
tisa-first-1 --position tisa --position-options '{"layers": "first"}' --seed 1
tisa-shared-1 --position tisa --position-options '{"layers": "shared"}' --seed 1
RUNS
"$python" runs/pretrain_report.py report "$work/where" --out "$work/report/where" || true
