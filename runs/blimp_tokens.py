"""BLiMP cut into tokens, for a machine that has no tokenizer.

    python3 runs/blimp_tokens.py BLIMP TOKENIZER OUT

BLIMP is blimp.json.xz, TOKENIZER what `tisa-lab pretrain --tokenizer` takes, OUT a file .json.xz.
"""

import json
import lzma
import sys
from pathlib import Path

from tisa.store import write_bytes
from tisa_lab.evaluation.blimp import tokens_of
from tisa_lab.pretrain.text import tokenizer_of


def main() -> None:
    source, tokenizer, out = sys.argv[1:]
    sentences = json.loads(lzma.decompress(Path(source).read_bytes()))
    found = tokens_of(sentences, tokenizer_of(tokenizer))
    write_bytes(Path(out), lzma.compress(json.dumps(found, separators=(",", ":")).encode()))
    pairs = sum(len(one["pairs"]) for name, one in found.items() if name != "tokenizer")
    print(f"{pairs:,} pairs in {out}")


if __name__ == "__main__":
    main()
