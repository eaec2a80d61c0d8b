#!/usr/bin/env bash
# The corpus of the pretraining experiments, cut into ALBERT's tokens once, small enough to travel.
#   runs/pretrain_prepare.sh WIKI_FOLDER SPIECE_MODEL [FOLDER]
# WIKI_FOLDER has train.txt.xz and valid.txt.xz. Two minutes on one core; 28 MB in FOLDER (carry/).
set -euo pipefail
cd "$(dirname "$0")/.."
wiki=$1 spiece=$2 out=${3:-carry}
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD:$PWD/lab${PYTHONPATH:+:$PYTHONPATH}"
for part in train valid; do
  "$python" -m tisa_lab.cli pretrain --data "$wiki/$part.txt.xz" --tokenizer "$spiece" --prepare "$out/wiki-$part"
  xz -6 "$out/wiki-$part/tokens.bin"
done
