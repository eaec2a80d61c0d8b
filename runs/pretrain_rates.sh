#!/usr/bin/env bash
# Decoders over five learning rates: loss against rate, method by method (docs/log.md has what was expected).
#   SEED=0 POSITIONS=near-far,kerple-log,tisa,t5,rotary runs/pretrain_rates.sh      (may be started again)
LEARNING_RATE=${RATES:-5e-4,1e-3,2e-3,4e-3,8e-3}
. "$(dirname "$0")/pretrain_settings.sh"
train rates $decoder --seed "${SEED:-0}" --seeds "${SEEDS:-1}" --position "${POSITIONS:-near-far,kerple-log,tisa,t5,rotary}"
