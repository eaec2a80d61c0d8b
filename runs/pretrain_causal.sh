#!/usr/bin/env bash
# Experiment (ii): a causal decoder trained at 512 tokens and read at 512 … 8,192.
#   runs/pretrain_causal.sh      (may be started again; reads what is finished)
. "$(dirname "$0")/pretrain_settings.sh"
reading=${SECONDS_READING:-120}
"$python" runs/pretrain_grid.py "$work/causal" --jobs "$jobs" --seconds "$((seconds - reading))" --collect "$out/causal.tar.gz" -- $decoder $extra <<'RUNS' || true
tisa-0 --position tisa --seed 0
near-far-0 --position near-far --seed 0
alibi-0 --position alibi --seed 0
kerple-log-0 --position kerple-log --seed 0
rotary-0 --position rotary --seed 0
tisa-v2-0 --position tisa-v2 --seed 0
t5-0 --position t5 --seed 0
none-0 --position none --seed 0
absolute-0 --position absolute --seed 0
sinusoidal-0 --position sinusoidal --position-options '{"scale": 0.028}' --seed 0
tisa-1 --position tisa --seed 1
near-far-1 --position near-far --seed 1
rotary-1 --position rotary --seed 1
alibi-1 --position alibi --seed 1
shaw-0 --position shaw --seed 0
tupe-a-0 --position tupe-a --seed 0
synthesizer-random-0 --position synthesizer-random --seed 0
kerple-log-1 --position kerple-log --seed 1
tisa-v2-1 --position tisa-v2 --seed 1
t5-1 --position t5 --seed 1
RUNS
"$python" runs/pretrain_report.py report "$work/causal" --out "$work/report/causal" || true
finished=$(for f in "$work"/causal/*/record.json; do dirname "$f"; done)
"$python" -m tisa_lab.cli extrapolate $finished --data "$data/wiki-valid" --lengths "${LENGTHS:-512,1024,2048,4096,8192}" \
  --stride "${STRIDE:-512}" ${READ:---bf16} --out "$out/extrapolation"
