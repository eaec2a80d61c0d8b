#!/usr/bin/env bash
# The corpus of the pretraining experiments, cut into ALBERT's tokens once, small enough to travel; BLiMP too.
#   runs/pretrain_prepare.sh WIKI_FOLDER SPIECE_MODEL [FOLDER [BLIMP]]
# WIKI_FOLDER has train.txt.xz and valid.txt.xz, BLIMP is blimp.json.xz. Two minutes on one core; 28 MB in FOLDER (carry/).
set -euo pipefail
cd "$(dirname "$0")/.."
wiki=$1 spiece=$2 out=${3:-carry} blimp=${4:-}
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD:$PWD/lab${PYTHONPATH:+:$PYTHONPATH}"
for part in train valid; do
  if [ ! -f "$out/wiki-$part/tokens.bin.xz" ]; then
    "$python" -m tisa_lab.cli pretrain --data "$wiki/$part.txt.xz" --tokenizer "$spiece" --prepare "$out/wiki-$part"
    xz -6 "$out/wiki-$part/tokens.bin"
  fi
done
if [ -n "$blimp" ]; then "$python" runs/blimp_tokens.py "$blimp" "$spiece" "$out/blimp.json.xz"; fi
