"""What of the original is lost with length: its attention, or what place does to hidden states?

    python runs/length_residual.py --data-dir DATA --out docs/records/DATE-length-residual.json

all-MiniLM-L6-v2 on beginnings of held-out articles. "Own attention": the folded model is given the
original's attention weights in every layer, so that no score function, of the offset or of both
places, could do better at copying attention; what is still lost comes from the hidden states, which
carry place in the original and one folded vector here. "Shifted": the original itself, the same
text a number of places further on ([CLS] stays), beside the original where it belongs.
"""

import argparse
from pathlib import Path

import torch
import transformers
from conversion import model_folder, writer
from conversion_length import LENGTHS, articles
from torch.nn.functional import cosine_similarity

from tisa_lab.record import commit

SHIFTS = (16, 64, 128, 256)


def hidden(model, ids, places, weights=None):
    """Return last hidden states and attention weights, with these position vectors."""
    words = model.embeddings
    x = words.word_embeddings(ids) + words.token_type_embeddings.weight[0] + places
    x, seen = words.LayerNorm(x), []
    heads = model.config.num_attention_heads
    for number, layer in enumerate(model.encoder.layer):
        own = layer.attention.self
        query, key, value = (
            part(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in (own.query, own.key, own.value)
        )
        given = weights[number] if weights is not None else None
        seen.append((query @ key.mT * own.scaling).softmax(-1) if given is None else given)
        mixed = (seen[-1] @ value).transpose(1, 2).flatten(2)
        x = layer.attention.output(mixed, x)
        x = layer.output(layer.intermediate(x), x)
    return x, seen


@torch.no_grad()
def residual(model, ids) -> dict:
    table = model.embeddings.position_embeddings.weight
    length = ids.shape[1]

    def folded(end):
        places = table[1:end].mean(0).repeat(length, 1)
        places[0], places[-1] = table[0], table[length - 1]
        return places

    original, weights = hidden(model, ids, table[:length])
    check = model(input_ids=ids)[0]
    assert torch.allclose(original, check, atol=1e-4), "this is not the model"
    pooled = original.mean(1)

    def near(found):
        return float(cosine_similarity(found.mean(1), pooled).mean())

    own, _ = hidden(model, ids, folded(length - 1), weights)
    off = own.mean(1) - pooled
    rows = {
        "own attention, fold over this length": near(own),
        "own attention, fold over 30 places": near(hidden(model, ids, folded(30), weights)[0]),
        "no scores, fold over this length": near(hidden(model, ids, folded(length - 1))[0]),
        "share of the first error that all texts have in common": float(
            off.mean(0).square().sum() / off.square().sum(1).mean()
        ),
    }
    for shift in SHIFTS:
        if length + shift <= len(table):
            places = torch.cat((table[:1], table[1 + shift : length + shift]))
            rows[f"original, shifted by {shift}"] = near(hidden(model, ids, places)[0])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="", help="where there is no repository")
    args = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    command = (
        f"python runs/length_residual.py --texts {args.texts} --device {args.device} "
        f"--data-dir DATA --out {args.out}"
    )
    write = writer(args.out, command, args.device, args.commit or commit())
    folder = model_folder("minilm", args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    model = model.eval().to(args.device)
    texts = articles(args.data_dir)[100 : 100 + args.texts]
    found: dict = {"rows": {}}
    for length in LENGTHS:
        given = tokenizer(texts, truncation=True, max_length=length, return_tensors="pt")
        found["rows"][length] = residual(model, given["input_ids"].to(args.device))
        print(length, found["rows"][length], flush=True)
        write(found)


if __name__ == "__main__":
    main()
