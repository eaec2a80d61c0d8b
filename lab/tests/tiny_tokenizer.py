"""A small tokenizer of transformers, made on the spot."""


def saved_tokenizer(folder, *, mask="[MASK]"):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz0123456789,"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *([mask] if mask else [])]
    vocabulary = {piece: number for number, piece in enumerate([*special, *letters])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", **({"mask_token": mask} if mask else {}),
    )  # fmt: skip
    made.save_pretrained(folder)
    return folder
