#!/usr/bin/env bash
# Every test that needs a GPU, in processes side by side (most of it is Triton's compiler); five minutes on 16 cores.
#   runs/gpu_tests.sh OUT [LIMIT_S]
# Needs torch, triton, transformers and pytest; python3 is to have them. OUT/gpu-tests.txt is the record.
cd "$(dirname "$0")/.."
out=$1 limit=${2:-400}
mkdir -p "$out/logs"
export PYTHONPATH=.:lab:tests:tests/ops:tests/hf:$PYTHONPATH PYTHONUNBUFFERED=1 JAXTYPING_DISABLE=1 OMP_NUM_THREADS=1
record=$out/gpu-tests.txt
python3 -c "
import platform, torch, transformers, triton
print(torch.cuda.get_device_name(), 'torch', torch.__version__, 'triton', triton.__version__, 'Python',
      platform.python_version(), 'transformers', transformers.__version__, sep=', ')" | sed 's/, \([0-9]\)/ \1/g' > "$record"
cat commit.txt >> "$record" 2>/dev/null || git rev-parse --short HEAD >> "$record"
part() { # a file, and which of its tests
  local log
  log=$out/logs/$(echo "$*" | tr -c 'A-Za-z0-9_\n' -).txt
  timeout "$limit" python3 -m pytest --noconftest -q -p no:cacheprovider -o addopts= --durations=3 "$1" -k "$2" > "$log" 2>&1
  echo "$1 -k \"$2\": $(tail -1 "$log")" >> "$record"
  grep -E "^(E  |FAILED|ERROR)" "$log" | cut -c1-300 | head -12 >> "$record"
}
ops=tests/ops/test_gpu.py fused=tests/ops/test_gpu_fused.py native=tests/ops/test_gpu_native.py
scoring=tests/test_gpu_scoring.py
part $ops "not triton and float32" &
part $ops "not triton and bfloat16 and (flex or auto)" &
part $ops "not triton and bfloat16 and not (flex or auto)" &
part $ops "not triton and not float16 and not bfloat16 and not float32" &
part $ops "triton and not float16 and not bfloat16 and not float32" &
part $ops "triton and float16 and not bfloat16" &
part $ops "triton and bfloat16" &
part $ops "triton and float32" &
part $fused "bfloat16" &
part $fused "float16 and not bfloat16" &
part $fused "not float16" &
part tests/hf/test_gpu_converted.py "not nothing" &
part $scoring "not nothing" &
part $native "not scoring" &
part $native "scoring" &
wait
cat "$record"
