"""A Hugging Face model without its position table: kernels fitted to its own heads instead.

Give a model by its folder or its name on the hub; without one, a tiny BERT is made on the spot.
"""

import argparse
import tempfile

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import tisa.hf


def tiny() -> BertModel:
    """Return a BERT whose heads copy the word before and the one two places on."""
    size = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = BertModel(BertConfig(vocab_size=60, max_position_embeddings=64, **size)).eval()
    angles = torch.arange(64)[:, None] * 20.0 ** -torch.linspace(0, 1, 8)
    waves, own = torch.cat((angles.sin(), angles.cos()), 1), model.encoder.layer[0].attention.self
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.normal_()[:, 16:] = 0
        model.embeddings.position_embeddings.weight.copy_(torch.cat((0 * waves, 0.3 * waves), 1))
        model.encoder.layer[0].attention.output.dense.weight.copy_(torch.eye(32))
        for half, offset in ((slice(16), -1), (slice(16, 32), 2)):
            turn = torch.linalg.lstsq(waves[2:-2], waves[2 + offset : 62 + offset]).solution
            own.query.weight[half, 16:], own.key.weight[half, 16:] = 6 * turn.T, 6 * torch.eye(16)
            own.value.weight[half, :16] = torch.eye(16)
    return model


def main() -> None:
    """Convert, save, load again, compare with the original."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name; by default a tiny BERT made here")
    name = parser.parse_args().model
    torch.manual_seed(0)
    model, tokenizer = tiny(), None
    texts = [[2, *torch.randint(4, 60, (n,)).tolist(), 3] for n in range(6, 38)]
    inputs = {"input_ids": torch.tensor(texts[10:11])}
    if name is not None:
        model, tokenizer = (kind.from_pretrained(name) for kind in (AutoModel, AutoTokenizer))
        # Texts None are the built-in ones; your own are better.
        inputs, texts = tokenizer("The dog bit the man, not the cat.", return_tensors="pt"), None
    options = dict(calibration=texts, tokenizer=tokenizer)
    converted = tisa.hf.convert(model, **options)
    without = tisa.hf.convert(model, num_kernels=0, **options)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        converted.save_pretrained(folder)
        loaded = AutoModel.from_pretrained(folder).eval()
        before, after, bare = (m(**inputs).last_hidden_state for m in (model, loaded, without))
    for kind, found in (("with kernels", after), ("without", bare)):
        near = torch.cosine_similarity(before, found, dim=-1).mean()
        print(f"cosine to the original, token by token, {kind}: {near:.3f}")
    table = loaded.config.tisa["replaced_parameters"]
    print(f"{type(loaded).__name__} without the {table:,} numbers of its position table")


if __name__ == "__main__":
    main()
