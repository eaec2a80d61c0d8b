"""A small BERT trained on the spot, for where no pretrained model can be had.

It finds masked words in the demo's own sentences and in ones made of its deeds; words and their
order are all that it has ever seen.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tisa.hf.default_text import SENTENCES
from tisa.store import Damaged, check_folder, new_folder, read_json, seal_folder, write_json
from tisa_lab.demo.sentences import DEEDS, HELD_OUT, TRAINING
from tisa_lab.demo.settings import Settings

KIND, MADE_WITH = "small model", "made_with.json"
LONGEST, MASKED = 48, 0.2
WHERE = ("", " in the garden", " on the bridge", " before the storm", " after dinner",
         " in the old town", " behind the church", " every summer")  # fmt: skip


def trained_small_model(
    out: Path, settings: Settings, progress: Callable[[float], None] = lambda share: None
) -> Path:
    """Return the folder of the trained model inside `out`; one that is there already is taken."""
    folder, key = out / "small-model", _key(settings)
    # Of before it has no manifest; a damaged one is trained again.
    with suppress(Damaged, FileNotFoundError):
        check_folder(folder, KIND)
        if read_json(folder / MADE_WITH, remedy="") == key:
            return folder
    tokenizer = _tokenizer()
    model = _trained(tokenizer, settings, progress)
    with new_folder(folder, replace=True) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        write_json(unfinished / MADE_WITH, key)
        seal_folder(unfinished, KIND, key)
    return folder


def _key(settings: Settings) -> dict[str, Any]:
    return {"seed": settings.seed, "steps": settings.training_steps, "format": 1}


def _tokenizer() -> Any:
    """Return a tokenizer with one token for each word of the demo's sentences."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    cut = pre_tokenizers.BertPreTokenizer()
    deeds = [deed.passive() + deed.active() for deed in DEEDS]
    texts = [*SENTENCES, *TRAINING, *HELD_OUT, *deeds, *WHERE]
    words = sorted({w for text in texts for w, _ in cut.pre_tokenize_str(text.lower())})
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = cut
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=LONGEST,
    )  # fmt: skip


def _made(generator: random.Random) -> str:
    """Return a sentence in which anybody does anything to anybody, somewhere."""
    one, other, verb = (generator.choice(DEEDS) for _ in range(3))
    deed = verb._replace(
        agent=generator.choice((one.agent, one.patient)),
        patient=generator.choice((other.agent, other.patient)),
    )
    told = deed.active() if generator.random() < 0.6 else deed.passive()
    return told[:-1] + generator.choice(WHERE) + "."


def _text(generator: random.Random) -> str:
    """Return one to three sentences: the same words at many places, so that distance counts."""
    own = [*SENTENCES, *TRAINING]
    count = generator.choice((1, 2, 3))
    drawn = (
        generator.choice(own) if generator.random() < 0.4 else _made(generator)
        for _ in range(count)
    )  # fmt: skip
    return " ".join(drawn)


def _trained(tokenizer: Any, settings: Settings, progress: Callable[[float], None]) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = BertForMaskedLM(
            BertConfig(
                vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2,
                num_attention_heads=4, intermediate_size=256, max_position_embeddings=LONGEST,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        ).to(settings.device)  # fmt: skip
    generator, chance = random.Random(settings.seed), torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(settings.training_steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 30) * (1 - step / settings.training_steps)
        texts = [_text(generator) for _ in range(32)]
        given = tokenizer(
            texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        ids = given["input_ids"]
        masked = (torch.rand(ids.shape, generator=chance) < MASKED) & (ids > 4)
        if not masked.any():
            continue
        inputs = ids.masked_fill(masked, tokenizer.mask_token_id).to(settings.device)
        logits = model(
            input_ids=inputs, attention_mask=given["attention_mask"].to(settings.device)
        ).logits
        loss = cross_entropy(logits[masked.to(settings.device)], ids[masked].to(settings.device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress((step + 1) / settings.training_steps)
    return model.base_model
