#!/usr/bin/env bash
# FLOATER at smaller learning rates, other methods beside it: at the rate of all runs its loss becomes nan.
#   runs/pretrain_floater.sh     (RATES=… for other encoders, RATES= for the decoder alone)
. "$(dirname "$0")/pretrain_settings.sh"
export CUDA_MPS_CLIENT_PRIORITY=0
for rate in ${RATES-1e-3 5e-4 2.5e-4}; do
  # A step of the solver for 4 positions, not 16, so that a coarse solver is not what fails.
  beside=$([ "$rate" = 1e-3 ] || echo ,tisa,absolute)
  train "floater-$rate" $encoder --learning-rate "$rate" --position "floater:stride=4$beside" &
done
# The decoder at half the rate, read past its training length.
seconds=$((seconds - 60))
train floater-causal $decoder --learning-rate 5e-4 --position floater:stride=16,tisa
wait
read_far floater-causal floater-extrapolation
