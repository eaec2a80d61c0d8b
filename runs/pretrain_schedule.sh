#!/usr/bin/env bash
# Experiment (iv): BERT's schedule, 128 tokens for 90 % of the steps and 512 for the rest, beside 512 all the time.
#   runs/pretrain_schedule.sh
. "$(dirname "$0")/pretrain_settings.sh"
jobs=2
train schedule $encoder --position absolute,tisa --lengths 128:0.9,512:0.1 &
train schedule $encoder --position absolute,tisa --lengths 512
wait
report schedule
