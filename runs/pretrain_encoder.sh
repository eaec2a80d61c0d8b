#!/usr/bin/env bash
# Experiment (i): all methods in one encoder, same tokens, seeds and recipe.
#   runs/pretrain_encoder.sh     (after the gate, with the same STEPS and BATCH_TOKENS; may be started again)
. "$(dirname "$0")/pretrain_settings.sh"
# The slow ones first, so that the others run beside them. FLOATER diverges at this learning rate: pretrain_floater.sh.
train encoder $encoder --seeds 2 --position shaw,synthesizer-random,tupe-a,none,absolute,tisa,near-far,rotary,t5,alibi,kerple-log,tisa-v2,sinusoidal:scale=0.028
report encoder
