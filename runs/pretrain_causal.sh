#!/usr/bin/env bash
# Experiment (ii): a causal decoder trained at 512 tokens and read at 512 … 8,192.
#   runs/pretrain_causal.sh      (may be started again; reads what is finished)
. "$(dirname "$0")/pretrain_settings.sh"
seconds=$((seconds - ${SECONDS_READING:-120}))
train causal $decoder --seeds 2 --position tisa,near-far,alibi,kerple-log,rotary,tisa-v2,t5,none,absolute,sinusoidal:scale=0.028,shaw,tupe-a,synthesizer-random
report causal
read_far causal extrapolation
