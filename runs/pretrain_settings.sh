# Read by the other pretrain_*.sh: what all runs have in common. Every value may be set from outside.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
carried=${DATA:-carry}             # what pretrain_prepare.sh wrote
work=${WORK:-/tmp/tisa-pretrain}   # corpus unpacked, checkpoints, models, logs: large
out=${OUT:-$work/results}          # what is kept
jobs=${JOBS:-6}                    # runs at a time on the GPU
seconds=${SECONDS_EACH:-500}       # for this script
export PYTHONPATH="$PWD:$PWD/lab${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
data="$work/corpus"
mkdir -p "$data" "$out"
for part in train valid; do
  if [ ! -f "$data/wiki-$part/tokens.bin" ]; then
    cp -r "$carried/wiki-$part" "$data/"
    "$python" -c "import lzma, pathlib, sys; p = pathlib.Path(sys.argv[1]); p.with_suffix('').write_bytes(lzma.decompress(p.read_bytes()))" "$data/wiki-$part/tokens.bin.xz"
  fi
done
if [ -n "${MPS:-}" ]; then         # runs compute at the same time instead of in turns: 3.5 M tokens a second instead of 1.5
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
  export CUDA_MPS_CLIENT_PRIORITY=1  # below normal: a run with many small kernels (FLOATER) asks for 0
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d >/dev/null 2>&1 || true   # it runs already
fi
common="--data $data/wiki-train --valid $data/wiki-valid --layers 4 --learning-rate ${LEARNING_RATE:-1e-3} \
  --log-every 50 --checkpoint-every 800 --valid-tokens 400000 ${FAST:---bf16 --compile}"
# 18.8 M parameters besides the positions. Embeddings as wide as the rest: absolute positions leave the plateau of
# `none` after 600 steps, with ALBERT's of 128 only after 1,200 or 1,500 (docs/log.md).
encoder="$common --hidden 384 --heads 6 --embedding 384 --objective mlm --norm ${NORM:-post} --lengths ${LENGTH:-128} \
  --batch-tokens ${BATCH_TOKENS:-32768} --steps ${STEPS:-2000} --evaluate-every ${EVERY:-200}"
# 16.6 M: ALBERT's embeddings.
decoder="$common --hidden 512 --heads 8 --embedding 128 --objective causal --lengths 512 \
  --batch-tokens ${BATCH_TOKENS:-16384} --steps ${STEPS:-2000} --evaluate-every ${EVERY:-500}"
extra=${EXTRA:-}                   # further options, for a rehearsal on a CPU: see docs/pretraining.md
