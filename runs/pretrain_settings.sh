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
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$work/inductor} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$work/triton}
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
common="--data $data/wiki-train --valid $data/wiki-valid --num-hidden-layers 4 --learning-rate ${LEARNING_RATE:-1e-3} \
  --log-every 50 --checkpoint-every 800 --valid-tokens 400000 ${FAST:---bf16 --compile}"
# 18.8 M parameters besides the positions. Embeddings as wide as the rest: absolute positions leave the plateau of
# `none` after 600 steps, with ALBERT's of 128 only after 1,200 or 1,500 (docs/log.md).
encoder="$common --hidden-size 384 --num-attention-heads 6 --embedding-size 384 --objective mlm --norm ${NORM:-post} --lengths ${LENGTH:-128} \
  --batch-tokens ${BATCH_TOKENS:-32768} --steps ${STEPS:-2000} --evaluate-every ${EVERY:-200}"
# 16.6 M: ALBERT's embeddings.
decoder="$common --hidden-size 512 --num-attention-heads 8 --embedding-size 128 --objective causal --lengths 512 \
  --batch-tokens ${BATCH_TOKENS:-16384} --steps ${STEPS:-2000} --evaluate-every ${EVERY:-500}"
# What every trained model is asked before its run ends; EVALUATE= asks nothing.
asked=
if [ -n "${EVALUATE=}" ]; then
  asked="--evaluate $EVALUATE --reading rotary:scaling=yarn,rotary:scaling=ntk"
  case $EVALUATE in *blimp*) asked="$asked --blimp $carried/blimp.json.xz" ;; esac
fi
extra=${EXTRA:-}                   # further options, for a rehearsal on a CPU: see docs/pretraining.md
# train FOLDER OPTIONS…: a grid in $work/FOLDER, its small results in $out. What an earlier piece left there as FOLDER.jsonl
# and is given back in carry/ is not trained again.
train() {
  local name=$1; shift
  begin "$name"
  grid "$name" "$jobs" "$@"
  collect "$name"
}
begin() {                          # begin FOLDER
  local name=$1
  mkdir -p "$work/$name"
  [ -f "$work/$name/records.jsonl" ] || cp "$carried/$name.jsonl" "$work/$name/records.jsonl" 2>/dev/null || true
}
grid() {                           # grid FOLDER JOBS OPTIONS…: several may share a folder, side by side
  local name=$1 workers=$2; shift 2
  "$python" -m tisa_lab.cli pretrain --out "$work/$name" --executor pool --workers "$workers" --max-seconds "$seconds" "$@" $extra || true
}
collect() {                        # collect FOLDER
  local name=$1
  cp "$work/$name/records.jsonl" "$out/$name.jsonl" || true
  (cd "$work/$name" && find . -name '*.json' -o -name records.jsonl -o -name losses.npy -o -name table.npy -o -name log.txt) |
    grep -v -e /checkpoints/ -e /model/ | tar czf "$out/$name.tar.gz" -C "$work/$name" -T -
}
report() {                         # report FOLDER: tables and figures of a grid
  "$python" runs/pretrain_report.py report "$work/$1" --out "$work/report/$1" || true
}
read_far() {                       # read_far FOLDER RESULT: the finished models of a grid past their training length
  "$python" -m tisa_lab.cli extrapolate $(for f in "$work/$1"/*/model/config.json; do dirname "$(dirname "$f")"; done) \
    --data "$data/wiki-valid" --lengths "${LENGTHS:-512,1024,2048,4096,8192}" --stride "${STRIDE:-512}" ${READ:---bf16} --out "$out/$2"
}
