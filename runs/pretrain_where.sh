#!/usr/bin/env bash
# Experiments (iii) and (iv): where scores are needed (first layer, shared, one per layer: that is tisa-0 of the
# encoder's runs), and BERT's schedule, 128 tokens for 90 % of the steps and 512 for the rest.
#   runs/pretrain_where.sh
. "$(dirname "$0")/pretrain_settings.sh"
"$python" runs/pretrain_grid.py "$work/where" --jobs "$jobs" --seconds "$seconds" --collect "$out/where.tar.gz" -- $encoder $extra <<'RUNS'
absolute-schedule-0 --position absolute --lengths 128:0.9,512:0.1 --seed 0
tisa-first-0 --position tisa --position-options '{"layers": "first"}' --seed 0
tisa-shared-0 --position tisa --position-options '{"layers": "shared"}' --seed 0
near-far-first-0 --position near-far --position-options '{"layers": "first"}' --seed 0
near-far-shared-0 --position near-far --position-options '{"layers": "shared"}' --seed 0
tisa-schedule-0 --position tisa --lengths 128:0.9,512:0.1 --seed 0
RUNS
"$python" runs/pretrain_report.py report "$work/where" --out "$work/report/where" || true
