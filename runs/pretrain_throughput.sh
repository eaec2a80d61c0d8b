#!/usr/bin/env bash
# A step with each method, alone on the GPU: TISA's beside that with absolute positions, model FLOP utilisation.
#   runs/pretrain_throughput.sh  (METHODS=… for others)
. "$(dirname "$0")/pretrain_settings.sh"
"$python" runs/pretrain_throughput.py --data "$data/wiki-train" --out "$out" \
  --methods "${METHODS:-absolute,tisa,none,near-far,rotary}" --batch-tokens "${BATCH_TOKENS:-32768}" $extra
