"""Tiny random models of every supported family, and what is done with them in many tests."""

import torch
import transformers

import tisa

SIZES = dict(
    vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=40, max_position_embeddings=64, pad_token_id=1,
)  # fmt: skip


def decoder(**changes):
    return {**SIZES, "bos_token_id": 2, "eos_token_id": 3, **changes}


FAMILIES = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES)),
    "electra": lambda: transformers.ElectraForMaskedLM(
        transformers.ElectraConfig(**SIZES, embedding_size=16)
    ),
    "distilbert": lambda: transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(
            vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=40,
            max_position_embeddings=64, pad_token_id=1,
        )
    ),
    "albert": lambda: transformers.AlbertForMaskedLM(
        transformers.AlbertConfig(**{**SIZES, "num_hidden_layers": 3}, embedding_size=16)
    ),
    "mpnet": lambda: transformers.MPNetForMaskedLM(transformers.MPNetConfig(**SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64,
            bos_token_id=2, eos_token_id=3, pad_token_id=1,
        )
    ),
    # Of no type that is registered from the start.
    "gpt_bigcode": lambda: transformers.GPTBigCodeForCausalLM(
        transformers.GPTBigCodeConfig(
            vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64,
            bos_token_id=2, eos_token_id=3, pad_token_id=1,
        )
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **{k: v for k, v in decoder().items() if k != "intermediate_size"},
            ffn_dim=40, word_embed_proj_dim=32,
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**decoder(), num_key_value_heads=2)
    ),
}  # fmt: skip
DECODERS = ("gpt2", "gpt_bigcode", "opt", "llama")
ROTARY = ("llama",)
IMPLEMENTATIONS = ("eager", "sdpa", "tisa")


def original(name, *, spread=True, kinds=FAMILIES):
    """Return a tiny model; with `spread`, one whose positions and attention matter."""
    torch.manual_seed(0)
    model = kinds[name]().eval()
    if spread:
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 2:
                    p.mul_(6.0)
    return model


def implementations(name):
    return ("eager", "tisa") if name == "mpnet" else IMPLEMENTATIONS


def inputs(batch=3, length=11, *, padded=True):
    ids = torch.randint(4, 60, (batch, length), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 2
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 7:] = 0
        ids[0, 7:] = 1
    last = mask.sum(1) - 1
    ids[torch.arange(batch), last] = 3
    return {"input_ids": ids, "attention_mask": mask}


def token_lists(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 20, (count,), generator=generator).tolist()
    return [[2, *torch.randint(4, 60, (n,), generator=generator).tolist(), 3] for n in lengths]


def shake(model, scale=1.0):
    """Give every kernel an amplitude that matters, and return the model."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, tisa.TISA):
                noise = torch.randn(module.kernel_amplitudes.shape, generator=generator)
                module.kernel_amplitudes.copy_(scale * noise)
    return model


def logits(model, **kwargs):
    with torch.no_grad():
        return model(**kwargs).logits


def checkpoint_activations(model, **settings):
    """Switch it on under its name of transformers 5.23, or of before."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)(settings or None)
