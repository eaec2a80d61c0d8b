#!/usr/bin/env bash
# Every test that needs a GPU, in processes side by side (most of it is Triton's compiler); three minutes on 16 cores.
#   runs/gpu_tests.sh OUT [LIMIT_S] [PROCESSES]
# Needs torch, triton, transformers and pytest; python3 is to have them. OUT/gpu-tests.txt is the record.
cd "$(dirname "$0")/.."
out=$1 limit=${2:-400} processes=${3:-16}
mkdir -p "$out/logs"
export PYTHONPATH=.:lab:tests:tests/ops:tests/hf:$PYTHONPATH PYTHONUNBUFFERED=1 JAXTYPING_DISABLE=1 OMP_NUM_THREADS=1
record=$out/gpu-tests.txt
python3 -c "
import platform, torch, transformers, triton
print(torch.cuda.get_device_name(), 'torch', torch.__version__, 'triton', triton.__version__, 'Python',
      platform.python_version(), 'transformers', transformers.__version__, sep=', ')" | sed 's/, \([0-9]\)/ \1/g' > "$record"
cat commit.txt >> "$record" 2>/dev/null || git rev-parse --short HEAD >> "$record"
files="tests/ops/test_gpu.py tests/ops/test_gpu_fused.py tests/ops/test_gpu_always.py tests/ops/test_gpu_native.py tests/test_gpu_scoring.py tests/hf/test_gpu_converted.py tests/positions/test_gpu_positions.py tests/transformer/test_gpu_gates.py"
echo "$files" >> "$record"
for ((i = 0; i < processes; i++)); do
  (
    log=$out/logs/$i.txt
    timeout -s INT -k 9 "$limit" python3 -m pytest --noconftest -q -p no:cacheprovider -p shares --share "$i/$processes" \
      -o addopts= --durations=3 $files > "$log" 2>&1
    echo "share $i: $(tail -1 "$log")" >> "$record"
    grep -E "^(E  |FAILED|ERROR)" "$log" | sed "s#$PWD/##g" | cut -c1-300 | head -12 >> "$record"
  ) &
done
wait
echo "all: $(grep -o '[0-9]* passed' "$record" | awk '{n += $1} END {print n + 0}') passed," \
  "$(grep -o '[0-9]* failed' "$record" | awk '{n += $1} END {print n + 0}') failed" >> "$record"
cat "$record"
