#!/usr/bin/env bash
# Experiment (iii): where scores are needed: first layer, shared by all, one per layer (tisa of the encoder's runs).
#   runs/pretrain_where.sh
. "$(dirname "$0")/pretrain_settings.sh"
train where $encoder --seeds 2 --position tisa:layers=first,tisa:layers=shared
report where
