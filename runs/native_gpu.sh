#!/usr/bin/env bash
# Calls in C++ on a GPU: built, compared bit for bit with those in Python, and the host's time by part; four minutes.
#   runs/native_gpu.sh OUT [COMMIT]
# Needs torch, triton, transformers, pytest and a C++ compiler; python3 is to have them.
cd "$(dirname "$0")/.."
out=$1
mkdir -p "$out"
export PYTHONPATH=.:tests/ops PYTHONUNBUFFERED=1 JAXTYPING_DISABLE=1
exec > >(tee "$out/log") 2>&1
g++ --version | head -1; date
echo "== built"
timeout 90 python3 -W always -c "
import time, torch, triton
began = time.time()
from tisa.ops.triton import native
print(native.switch(True), native.state, round(time.time() - began), 's', torch.__version__, triton.__version__)"
tested() { # name, what pytest is told
  local name=$1
  shift
  timeout 100 python3 -m pytest --noconftest -q -p no:cacheprovider "$@" > "$out/$name" 2>&1
  echo "== $name: $(tail -1 "$out/$name")"
  grep -E "^(E  |FAILED|ERROR|C\+\+)" "$out/$name" | head -12
}
file=tests/ops/test_gpu_native.py
# Side by side: most of it is Triton's compiler.
tested calls1 $file -k "same_as_in_python and (plain or band or short or ragged or causal) and not scoring" &
tested calls2 $file -k "same_as_in_python and (window or grouped or mask or no or wide or decoding) and not scoring" &
tested modules $file -k "scoring_function" &
tested others $file -k "captured or waits or autocast or memory" &
tested thrice -p thrice tests/ops/test_gpu_fused.py \
  -k "remembered or addresses or captured or (budget and bfloat16 and (plain or padding))" &
wait %1 %2 %3 %4 %5
date
echo "== the host"
timeout 90 python3 benchmarks/host.py --rounds 12 --steps 10 --out "$out" --commit "${2:-unknown}"
date
