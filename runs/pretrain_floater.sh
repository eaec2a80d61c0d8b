#!/usr/bin/env bash
# FLOATER at smaller learning rates, other methods beside it: at the rate of all runs its loss becomes nan.
#   runs/pretrain_floater.sh     (RATES=… for other encoders, RATES= for the decoder alone)
. "$(dirname "$0")/pretrain_settings.sh"
for rate in ${RATES-1e-3 5e-4 2.5e-4}; do
  # A step of the solver for 4 positions, not 16, so that a coarse solver is not what fails.
  "$python" runs/pretrain_grid.py "$work/floater-$rate" --jobs "$jobs" --seconds "$seconds" --collect "$out/floater-$rate.tar.gz" -- $encoder $extra --learning-rate "$rate" <<RUNS || true &
CUDA_MPS_CLIENT_PRIORITY=0 floater-0 --position floater --position-options '{"stride": 4}' --seed 0
$(if [ "$rate" != 1e-3 ]; then for one in tisa absolute; do echo "$one-0 --position $one --seed 0"; done; fi)
RUNS
done
# The decoder at half the rate, read past its training length.
"$python" runs/pretrain_grid.py "$work/floater-causal" --jobs "$jobs" --seconds "$((seconds - 60))" --collect "$out/floater-causal.tar.gz" -- $decoder $extra --learning-rate 5e-4 <<'RUNS' || true
CUDA_MPS_CLIENT_PRIORITY=0 floater-0 --position floater --position-options '{"stride": 16}' --seed 0
tisa-0 --position tisa --seed 0
RUNS
wait
finished=$(for f in "$work"/floater-causal/*/record.json; do dirname "$f"; done)
"$python" -m tisa_lab.cli extrapolate $finished --data "$data/wiki-valid" --lengths "${LENGTHS:-512,1024,2048,4096,8192}" \
  --stride "${STRIDE:-512}" ${READ:---bf16} --out "$out/floater-extrapolation"
