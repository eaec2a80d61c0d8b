"""How near a converted model stays to the original on longer inputs, by what is tried for it.

    python runs/conversion_length.py --data-dir DATA --out docs/records/DATE-conversion-length.json
        [--tries S5 S5-pooled …] [--device cuda --batch-tokens 16384 --steps 1500 --seconds 60]

DATA has glue/STS-B in the official layout and wiki/train.txt.xz, articles with `= Title =` lines.
A try is a number of kernels and a way to distil. `free` has a score of its own for every offset in
place of kernels: what any function of the offset could reach.
"""

import argparse
import json
import lzma
import random
import re
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from conversion import model_folder, sts_b, timed, writer
from scipy.stats import spearmanr
from torch import nn
from torch.nn.functional import normalize

import tisa.hf
from tisa.hf import measure
from tisa.hf.core import OwnScores
from tisa.parameters import is_score
from tisa.scoring.base import ScoringFunction
from tisa_lab.record import commit

LENGTHS = (16, 64, 128, 256, 512)


class Try(NamedTuple):
    """What is tried: kernels per head, and how the model is distilled."""

    kernels: int
    free: bool = False
    pooled_weight: float = 1.0


TRIES = {
    "S5": Try(5),
    "S5-pooled": Try(5, pooled_weight=10.0),
    "S12": Try(12),
    "S12-pooled": Try(12, pooled_weight=10.0),
    "free": Try(12, free=True),
}


class FreeScores(ScoringFunction):
    """A score for each offset up to `reach` and no kernels."""

    def __init__(self, scoring: ScoringFunction, reach: int) -> None:
        super().__init__(scoring.num_attention_heads)
        offsets = torch.arange(-reach, reach + 1, device=scoring._place.device)
        self.reach, self.table = reach, nn.Parameter(scoring.scores(offsets).detach().clone())
        self.to(offsets.device)

    def scores(self, offsets):
        """Return each head's entry; beyond the table its last one."""
        return self.table[:, offsets.clamp(-self.reach, self.reach) + self.reach]

    def support(self, eps):
        """Return None: there is no band."""
        return None


def articles(folder: Path) -> list[str]:
    """Return the articles in the first 20 million letters that have over 900 words, shuffled."""
    with lzma.open(folder / "wiki" / "train.txt.xz", "rt", encoding="utf-8") as file:
        parts = re.split(r"\n\s*\n(?== [^=])", file.read(20_000_000))[:-1]
    texts = [re.sub(r"(?m)^ *=+ .* =+ *$", "", part).strip() for part in parts]
    random.Random(0).shuffle(texts)
    return [text for text in texts if len(text.split()) > 900]


def train_pieces(texts, rng) -> list[str]:
    pieces = []
    for text in texts:
        words = text.split()
        for size in (12, 30, 80, 200, 380):
            start = rng.randrange(max(1, len(words) - size))
            pieces.append(" ".join(words[start : start + size]))
    return pieces


def crops(texts, tokenizer, count: int, rng) -> list[list[int]]:
    """Return token ids of `count` places in the texts for each length, with both ends."""
    ids = [x for x in tokenizer(texts, add_special_tokens=False)["input_ids"] if len(x) > 600]
    made = []
    for length in LENGTHS[1:]:
        for _ in range(count):
            text = rng.choice(ids)
            start = rng.randrange(len(text) - length)
            inside = text[start : start + length - 2]
            made.append([tokenizer.cls_token_id, *inside, tokenizer.sep_token_id])
    return made


def started(original, tokenizer, pieces, kernels: int, folder: Path | None):
    """Return the model fitted without training, from the folder where it has been fitted before."""
    file = None if folder is None else folder / f"S{kernels}.pt"
    settings = dict(positions="replace", tokenizer=tokenizer, num_kernels=kernels, fold_by="inputs")
    if file is not None and file.is_file():
        known = torch.load(file, weights_only=True)
        converted = tisa.hf.convert(original, init="zero", calibration=pieces, **settings)
        converted.load_state_dict(known["scores"], strict=False)
        return converted, known["seconds"]
    converted, *seconds = timed(
        lambda: tisa.hf.convert(original, init="fit", calibration=pieces, **settings)
    )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"scores": scores_of(converted), "seconds": seconds}, file)
    return converted, seconds


def scores_of(model) -> dict:
    return {name: p.detach().cpu() for name, p in model.named_parameters() if is_score(name)}


def free(model, reach: int) -> None:
    for module in model.modules():
        if isinstance(module, OwnScores):
            module.offset_scores = nn.ModuleList(FreeScores(s, reach) for s in module.offset_scores)


class Bench:
    """What is measured of every model: by length, on short sentences, by order, by documents."""

    def __init__(self, original, tokenizer, held_out, args) -> None:
        self.original, self.tokenizer = original, tokenizer
        self.held_out = held_out
        dev = sts_b(args.data_dir, "dev")
        self.sts = [[row[f"sentence{i}"] for row in dev] for i in (1, 2)]
        self.gold = [float(row["score"]) for row in dev]
        self.theirs = [measure.embeddings(original, tokenizer, part) for part in self.sts]
        pool = [t for t in dict.fromkeys(self.sts[0]) if len(t.split()) > 4]
        self.ordered = random.Random(0).sample(pool, 125)
        self.halves = halves_of(held_out, tokenizer, args.documents)

    def short(self, model) -> dict:
        """Return what becomes of short sentences."""
        ours = [measure.embeddings(model, self.tokenizer, part) for part in self.sts]
        cosine = torch.cat([(a * b).sum(-1) for a, b in zip(ours, self.theirs, strict=True)])
        similar = (ours[0] * ours[1]).sum(-1).cpu()
        return {
            "STS-B dev Spearman": float(spearmanr(similar, self.gold)[0]),
            "cosine on STS-B dev": float(cosine.mean()),
        }

    def measured(self, model) -> dict:
        """Return all but the documents."""
        by = measure.cosine_by_length(
            model, self.original, self.tokenizer, self.held_out, LENGTHS, most=32
        )
        given = (model, self.original, self.tokenizer, self.ordered)
        return {
            "cosine by length": by,
            **self.short(model),
            "order-match": measure.order_match(*given),
            "order-match, shuffles": measure.order_match(*given, shuffles=True),
        }


def halves_of(texts, tokenizer, count: int) -> list[tuple[list[int], list[int]]]:
    halves = []
    for text in texts:
        if len(halves) == count:
            break
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= 2044:
            halves.append((ids[:1022], ids[1022:2044]))
    return halves


@torch.no_grad()
def embedded(model, tokenizer, documents, most: int) -> torch.Tensor:
    """Return the mean of each document's pieces' mean hidden states, of at most `most` tokens."""
    pieces, owner = [], []
    for number, ids in enumerate(documents):
        inner = most - 2
        count = -(-len(ids) // inner)
        # Pieces of one length: a short rest would count as much as a whole piece.
        for part in range(count):
            begin, end = part * len(ids) // count, (part + 1) * len(ids) // count
            pieces.append([tokenizer.cls_token_id, *ids[begin:end], tokenizer.sep_token_id])
            owner.append(number)
    total = torch.zeros(len(documents), model.config.hidden_size, device=model.device)
    order = sorted(range(len(pieces)), key=lambda i: len(pieces[i]))
    for start in range(0, len(order), 8):
        chosen = order[start : start + 8]
        given = tokenizer.pad({"input_ids": [pieces[i] for i in chosen]}, return_tensors="pt")
        given = given.to(model.device)
        weight = given["attention_mask"].unsqueeze(-1)
        means = (model(**given)[0] * weight).sum(1) / weight.sum(1)
        total.index_add_(0, torch.tensor([owner[i] for i in chosen], device=model.device), means)
    return normalize(total, dim=-1)


def documents_found(models: dict, tokenizer, halves) -> dict:
    """Return how often a document's second half finds its first half among all, by model."""
    found: dict = {"documents": len(halves)}
    for name, (model, most) in models.items():
        first, second = (embedded(model, tokenizer, [h[i] for h in halves], most) for i in (0, 1))
        similar = second @ first.T
        rank = (similar > similar.diagonal().unsqueeze(1)).sum(1) + 1
        found[name] = {
            "found first": float((rank == 1).float().mean()),
            "mean reciprocal rank": float((1 / rank).mean()),
        }
        print(name, found[name], flush=True)
    return found


def whole_documents(converted, original, tokenizer, halves) -> dict:
    """Return how near 2,048 tokens at once are to the mean of the original's pieces."""
    wholes = [first + second for first, second in halves]
    ours = embedded(converted, tokenizer, wholes, 2048)
    theirs = embedded(original, tokenizer, wholes, 512)
    similar = ours @ theirs.T
    others = similar[~torch.eye(len(wholes), dtype=torch.bool, device=similar.device)]
    return {
        "documents": len(wholes),
        "cosine to the original's mean of pieces": float(similar.diagonal().mean()),
        "cosine to that of other documents": float(others.mean()),
    }


def merge(files: list[Path], out: Path) -> None:
    """Write one record of several that were made side by side, each start only once."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    whole = {**records[0], "rows": []}
    whole["command"] = (
        f"sh runs/length_gpu.sh OUT {whole['commit']}; "
        f"python runs/conversion_length.py --merge OUT/length-*.json --out {out}"
    )
    for record in records:
        for row in record["rows"]:
            name, _, done = row["variant"].partition(": ")
            if done == "fitted":
                row["variant"] = f"S = {TRIES[name].kernels}, fitted"
            if row["variant"] not in [known["variant"] for known in whole["rows"]]:
                whole["rows"].append(row)
        whole |= {key: value for key, value in record.items() if key.endswith(": documents")}
    text = json.dumps(whole, indent=1, ensure_ascii=False)
    out.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tries", nargs="*", choices=list(TRIES), default=["S5"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--attention", default="tisa", help="implementation to distil with")
    parser.add_argument("--steps", type=int, default=90, help="of distillation")
    parser.add_argument("--seconds", type=float, help="at most so long for each distillation")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--crops", type=int, default=160, help="to distil on, for each length")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--wholes", type=int, default=50, help="documents embedded at once")
    parser.add_argument("--starts", type=Path, help="folder with fitted scores, kept for later")
    parser.add_argument("--commit", default="", help="where there is no repository")
    parser.add_argument("--merge", type=Path, nargs="*", help="records to make one of, no run")
    args = parser.parse_args()
    if args.merge:
        merge(args.merge, args.out)
        return
    torch.set_num_threads(min(2, torch.get_num_threads()))
    command = (
        f"python runs/conversion_length.py --tries {' '.join(args.tries)} --steps {args.steps} "
        f"--batch-tokens {args.batch_tokens} --crops {args.crops} --device {args.device} "
        f"--attention {args.attention} --data-dir DATA --out {args.out}"
    )
    write = writer(args.out, command, args.device, args.commit or commit())
    folder = model_folder("minilm", args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    original = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    original = original.eval().to(args.device)
    texts = articles(args.data_dir)
    train, held_out = texts[:100] + texts[600:], texts[100:600]
    rng = random.Random(3)
    sentences = [row["sentence1"] for row in sts_b(args.data_dir, "train")]
    pieces = rng.sample(sentences, 64) + train_pieces(train[:16], rng)
    mixed = rng.sample(sentences, min(len(sentences), 4 * args.crops))
    mixed += crops(train[16:], tokenizer, args.crops, rng)
    bench = Bench(original, tokenizer, held_out, args)
    found: dict = {"rows": []}

    def tell(name, model, **more):
        found["rows"].append({"variant": name, **bench.measured(model), **more})
        print(json.dumps(found["rows"][-1]), flush=True)
        write(found)

    for name in args.tries:
        chosen = TRIES[name]
        converted, seconds = started(original, tokenizer, pieces, chosen.kernels, args.starts)
        tell(f"{name}: fitted", converted, seconds=seconds[0], processor_seconds=seconds[1])
        if chosen.free:
            free(converted, reach=640)
        converted.set_attn_implementation(args.attention)
        torch.set_float32_matmul_precision("high")
        losses, wall, cpu = timed(
            lambda converted=converted, chosen=chosen: tisa.hf.distil(
                converted, original, mixed, tokenizer=tokenizer, steps=args.steps, by_length=True,
                minutes=args.seconds and args.seconds / 60, batch_tokens=args.batch_tokens,
                pooled_weight=chosen.pooled_weight,
            )
        )  # fmt: skip
        torch.set_float32_matmul_precision("highest")
        torch.save(scores_of(converted), args.out.with_name(f"{args.out.stem}-{name}.pt"))
        tell(f"{name}: distilled", converted, steps=len(losses), seconds=wall,
             processor_seconds=cpu, loss=sum(losses[-20:]) / len(losses[-20:]))  # fmt: skip
        models = {f"{name}, 1,024 tokens at once": (converted, 1024)}
        if name == args.tries[0]:
            models["original, mean of 512-token pieces"] = (original, 512)
        found[f"{name}: documents"] = {
            **documents_found(models, tokenizer, bench.halves),
            "2,048 tokens at once": whole_documents(
                converted, original, tokenizer, bench.halves[: args.wholes]
            ),
        }
        write(found)


if __name__ == "__main__":
    main()
