#!/bin/sh
# Every try of conversion_length.py side by side on one GPU, and on two cores each the records of
# conversion.py, which state how long a conversion takes; all end within about 150 seconds.
#
#     sh runs/length_gpu.sh OUT COMMIT [CARRY]
#
# CARRY (carry/) has minilm/, rxn/ (unpacked models), glue/STS-B, wiki/train.txt.xz, reactions.txt
# and, if they were fitted before, starts/.
out=$1 commit=$2 carry=${3:-carry}
export PYTHONPATH=.:lab
mkdir -p "$out"

one() { # name, attention, time limit, seconds of distillation
    timeout "$3" python3 runs/conversion_length.py --tries "$1" --attention "$2" --seconds "$4" \
        --steps 1500 --batch-tokens 16384 --crops 1280 --device cuda --commit "$commit" \
        --model "$carry/minilm" --data-dir "$carry" --starts "$carry/starts" \
        --out "$out/length-$1.json" > "$out/length-$1-$2.log" 2>&1
}

OMP_NUM_THREADS=2 timeout 148 taskset -c 0,1 python3 runs/conversion.py rxnmapper \
    --commit "$commit" --model "$carry/rxn" --reactions "$carry/reactions.txt" \
    --out "$out/conversion-rxnmapper.json" > "$out/rxnmapper.log" 2>&1 &
OMP_NUM_THREADS=2 timeout 148 taskset -c 2,3 python3 runs/conversion.py minilm \
    --commit "$commit" --model "$carry/minilm" --data-dir "$carry" \
    --out "$out/conversion-minilm.json" > "$out/minilm.log" 2>&1 &
timeout 100 python3 runs/length_residual.py --device cuda --texts 64 --commit "$commit" \
    --model "$carry/minilm" --data-dir "$carry" --out "$out/length-residual.json" \
    > "$out/residual.log" 2>&1 &
for name in S5 S5-pooled S12 S12-pooled free; do
    # Where the fused kernels fail, PyTorch's attention may still do in what time is left.
    { one $name tisa 148 60 || [ $? -eq 124 ] || one $name sdpa 100 45; } &
done
wait
tail -n 3 "$out"/*.log
