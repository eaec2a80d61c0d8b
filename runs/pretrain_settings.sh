# Read by the other pretrain_*.sh: what all runs have in common. Every value may be set from outside.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
carried=${DATA:-carry}             # what pretrain_prepare.sh wrote
work=${WORK:-/tmp/tisa-pretrain}   # corpus unpacked, checkpoints, models, logs: large
out=${OUT:-$work/results}          # what is kept
jobs=${JOBS:-6}                    # runs at a time on the GPU
seconds=${SECONDS_EACH:-500}       # for this script
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
data="$work/corpus"
mkdir -p "$data" "$out"
for part in train valid; do
  if [ ! -f "$data/wiki-$part/tokens.bin" ]; then
    cp -r "$carried/wiki-$part" "$data/"
    "$python" -c "import lzma, pathlib, sys; p = pathlib.Path(sys.argv[1]); p.with_suffix('').write_bytes(lzma.decompress(p.read_bytes()))" "$data/wiki-$part/tokens.bin.xz"
  fi
done
if [ -n "${MPS:-}" ]; then         # runs compute at the same time instead of in turns: 4 M tokens a second instead of 1.5
  export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d 2>/dev/null || true   # it runs already
fi
# 16.6 M parameters besides the positions: 4 layers, 512 wide, 8 heads, embeddings of 128 (ALBERT's).
common="--data $data/wiki-train --valid $data/wiki-valid --hidden 512 --layers 4 --heads 8 --embedding 128 \
  --learning-rate ${LEARNING_RATE:-1e-3} --log-every 50 --checkpoint-every 800 --valid-tokens 400000 ${FAST:---bf16 --compile}"
encoder="$common --objective mlm --norm ${NORM:-post} --lengths ${LENGTH:-128} --batch-tokens ${BATCH_TOKENS:-32768} --steps ${STEPS:-2600} --evaluate-every ${EVERY:-200}"
decoder="$common --objective causal --lengths 512 --batch-tokens ${BATCH_TOKENS:-16384} --steps ${STEPS:-2000} --evaluate-every ${EVERY:-500}"
extra=${EXTRA:-}                   # further options, for a rehearsal on a CPU: see docs/pretraining.md
