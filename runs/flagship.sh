#!/usr/bin/env bash
# Loss against the learning rate, and recall from afar against perplexity: figure and tables of docs/results.md.
#   runs/flagship.sh
# From every docs/records/…-rates, which runs/pretrain_rates.sh leaves behind; of a run in two of them the later one counts.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH="$PWD:$PWD/lab${PYTHONPATH:+:$PYTHONPATH}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m tisa_lab.cli report docs/records/*-rates --out "$work"
cp "$work/rates.png" docs/figures/pretrain/rates.png
"$python" docs/tables.py
