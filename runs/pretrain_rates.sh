#!/usr/bin/env bash
# Decoders over learning rates, and what each of them can do: loss against rate, method by method (docs/log.md has what was expected).
#   SEED=0 POSITIONS=near-far,kerple-log,tisa,t5,rotary runs/pretrain_rates.sh      (may be started again)
#   AT="1e-3:tisa,t5 2e-3:near-far,kerple-log" runs/pretrain_rates.sh               methods at rates of their own, side by side
# EVALUATE=blimp,windows,recall (the default; EVALUATE= for nothing) needs blimp.json.xz beside the corpus (pretrain_prepare.sh).
LEARNING_RATE=${RATES:-5e-4,1e-3,2e-3,4e-3,8e-3}
EVALUATE=${EVALUATE-blimp,windows,recall}
. "$(dirname "$0")/pretrain_settings.sh"
AT=${AT:-$LEARNING_RATE:${POSITIONS:-near-far,kerple-log,tisa,t5,rotary}}
count() { local names; IFS=, read -ra names <<<"${1#*:}"; echo "${#names[@]}"; }
total=0
for group in $AT; do total=$((total + $(count "$group"))); done
begin "${NAME:=rates}"
for group in $AT; do
  share=$(((jobs * $(count "$group") + total / 2) / total))
  grid "$NAME" $((share > 0 ? share : 1)) $decoder $asked --learning-rate "${group%%:*}" --position "${group#*:}" \
    --seed "${SEED:-0}" --seeds "${SEEDS:-1}" &
done
wait
collect "$NAME"
"$python" -m tisa_lab.cli report "$work/$NAME" || true
