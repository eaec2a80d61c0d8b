#!/bin/sh
# `tisa-lab long` with 295 articles to 8,192 tokens on one GPU: three processes side by side, 150 seconds at most.
#
#     sh runs/long_gpu.sh OUT [CARRY] [CONVERTED] [LIMIT_S]
#
# CARRY (carry/) has minilm/ (the unpacked model), wiki/train.txt.xz and packages/ (cyclopts and filelock, as
# CONTRIBUTING.md says). CONVERTED is what is converted, as in replace,extend,extend:window=128:sinks=ends, or folders
# of models that were converted before. The same command goes on with what had no time; OUT is carried along then.
out=$1 carry=${2:-carry} converted=${3:-replace,extend} limit=${4:-150}
export PYTHONPATH=$carry/packages:.:lab OMP_NUM_THREADS=5 TOKENIZERS_PARALLELISM=true
mkdir -p "$out"

# Without the figure, for which matplotlib is not there: `tisa-lab long` with these options draws it later and
# reads nothing again.
one() { # name, tasks, documents
    timeout -s INT -k 5 "$limit" python3 - "$out/$1" "$2" "$3" "$carry" "$converted" > "$out/$1.log" 2>&1 << 'END'
import sys
from pathlib import Path

from tisa import store
from tisa_lab.long.measuring import compared
from tisa_lab.long.report import markdown
from tisa_lab.long.settings import LongConfig
from tisa_lab.pretrain.text import Source
from tisa_lab.view import view_for

out, tasks, documents, carry, converted = sys.argv[1:]
config = LongConfig(
    lengths=(512, 1024, 2048, 4096, 8192), tasks=tuple(tasks.split(",")), documents=int(documents),
    queries=2, converted=tuple(converted.split(",")), batch_tokens=131072, bf16=True,
)
Path(out).mkdir(parents=True, exist_ok=True)
with view_for() as view:
    record = compared(
        [f"{carry}/minilm"], Path(out), source=Source((f"{carry}/wiki/train.txt.xz",)), config=config,
        device="cuda", command="sh runs/long_gpu.sh", view=view,
    )
store.write_json(Path(out) / "long.json", record, indent=None)
print(markdown(record))
END
}

one articles article,eighth 295 &
one removed removed 295 &
one hidden passkey,needle 64 &
wait
tail -n 60 "$out"/*.log
