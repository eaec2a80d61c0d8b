#!/usr/bin/env bash
# Experiment (i): all methods in one encoder, same tokens, seeds and recipe.
#   runs/pretrain_encoder.sh     (after the gate, with the same STEPS and BATCH_TOKENS; may be started again)
. "$(dirname "$0")/pretrain_settings.sh"
# The slow ones first, so that the others run beside them. FLOATER fails at this learning rate: pretrain_floater.sh.
"$python" runs/pretrain_grid.py "$work/encoder" --jobs "$jobs" --seconds "$seconds" --collect "$out/encoder.tar.gz" -- $encoder $extra <<'RUNS' || true
CUDA_MPS_CLIENT_PRIORITY=0 floater-0 --position floater --position-options '{"stride": 16}' --seed 0
shaw-0 --position shaw --seed 0
synthesizer-random-0 --position synthesizer-random --seed 0
tupe-a-0 --position tupe-a --seed 0
none-0 --position none --seed 0
absolute-0 --position absolute --seed 0
tisa-0 --position tisa --seed 0
near-far-0 --position near-far --seed 0
none-1 --position none --seed 1
absolute-1 --position absolute --seed 1
tisa-1 --position tisa --seed 1
near-far-1 --position near-far --seed 1
rotary-0 --position rotary --seed 0
t5-0 --position t5 --seed 0
alibi-0 --position alibi --seed 0
kerple-log-0 --position kerple-log --seed 0
tisa-v2-0 --position tisa-v2 --seed 0
sinusoidal-0 --position sinusoidal --position-options '{"scale": 0.028}' --seed 0
shaw-1 --position shaw --seed 1
tupe-a-1 --position tupe-a --seed 1
synthesizer-random-1 --position synthesizer-random --seed 1
rotary-1 --position rotary --seed 1
t5-1 --position t5 --seed 1
alibi-1 --position alibi --seed 1
kerple-log-1 --position kerple-log --seed 1
tisa-v2-1 --position tisa-v2 --seed 1
sinusoidal-1 --position sinusoidal --position-options '{"scale": 0.028}' --seed 1
RUNS
"$python" runs/pretrain_report.py report "$work/encoder" --out "$work/report/encoder" || true
