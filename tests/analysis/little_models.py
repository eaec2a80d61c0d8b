"""Little random models of every family, as transformers makes and saves them."""

import torch


def config_of(family):
    import transformers as hf

    common = dict(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16,
        vocab_size=40, max_position_embeddings=32,
    )  # fmt: skip
    tokens = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2)
    return {
        "BERT": lambda: hf.BertConfig(**common),
        "RoBERTa": lambda: hf.RobertaConfig(**common, **tokens),
        "ALBERT": lambda: hf.AlbertConfig(**common, embedding_size=8),
        "ELECTRA": lambda: hf.ElectraConfig(**common, embedding_size=8),
        "DistilBERT": lambda: hf.DistilBertConfig(
            dim=24, n_layers=2, n_heads=3, hidden_dim=16, vocab_size=40, max_position_embeddings=32
        ),
        "MPNet": lambda: hf.MPNetConfig(**common, **tokens),
        "Longformer": lambda: hf.LongformerConfig(**common, **tokens, attention_window=[4, 4]),
        "GPT-2": lambda: hf.GPT2Config(
            n_embd=24, n_layer=2, n_head=3, n_positions=32, vocab_size=40, bos_token_id=0,
            eos_token_id=0,
        ),
        "GPT-BigCode": lambda: hf.GPTBigCodeConfig(
            n_embd=24, n_layer=2, n_head=3, n_positions=32, vocab_size=40
        ),
        "OPT": lambda: hf.OPTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=3, ffn_dim=16, vocab_size=40,
            max_position_embeddings=32, word_embed_proj_dim=24, **tokens,
        ),
        "OPT, projected": lambda: hf.OPTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=3, ffn_dim=16, vocab_size=40,
            max_position_embeddings=32, word_embed_proj_dim=8, do_layer_norm_before=False, **tokens,
        ),
        "ViT": lambda: hf.ViTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16,
            image_size=20, patch_size=4,
        ),
        "Whisper decoder": lambda: hf.WhisperConfig(
            d_model=24, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=3, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=40,
            max_target_positions=32, max_source_positions=16, num_mel_bins=8,
            decoder_start_token_id=0, suppress_tokens=None, begin_suppress_tokens=None, **tokens,
        ),
        "T5": lambda: hf.T5Config(
            d_model=24, d_kv=8, d_ff=16, num_layers=2, num_heads=3, vocab_size=40,
            decoder_start_token_id=0,
        ),
    }[family]()  # fmt: skip


def model_of(family):
    """Return the model, its parameters large enough to tell mistakes apart."""
    import transformers as hf

    torch.manual_seed(1)
    model = hf.AutoModel.from_config(config_of(family)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.2, 0.5)
    return model
