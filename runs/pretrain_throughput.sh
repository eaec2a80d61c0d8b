#!/usr/bin/env bash
# A step with each method, alone on the GPU: TISA's beside that with absolute positions, model FLOP utilisation.
#   runs/pretrain_throughput.sh  (METHODS=…, BATCH_TOKENS=…; SHAPE="--length 512" for ALBERT's embeddings and rows of 512)
. "$(dirname "$0")/pretrain_settings.sh"
methods=${METHODS:-absolute,tisa,none,near-far,rotary,t5,tupe-a,shaw,synthesizer-random,sinusoidal,alibi,kerple-log,tisa-v2,floater}
shape=${SHAPE:---length 128 --hidden 384 --embedding 384 --norm post}   # that of pretrain_encoder.sh
export TORCHINDUCTOR_CACHE_DIR=$work/inductor
measure() {
  "$python" runs/pretrain_throughput.py --data "$data/wiki-train" --out "$out" --batch-tokens "${BATCH_TOKENS:-32768}" $shape "$@" $extra
}
for one in ${methods//,/ }; do     # compiled side by side
  while [ "$(jobs -r | wc -l)" -ge "$jobs" ]; do sleep 0.2; done
  measure --methods "$one" --rounds 0 > /dev/null 2>&1 &
done
wait
measure --methods "$methods"
