"""What a run will be and cost, in words, before anything is spent on it."""

from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.corpus import Corpus, Place
from tisa_lab.pretrain.launching import Settings, micro_batches
from tisa_lab.pretrain.model import build
from tisa_lab.pretrain.rows import Rows
from tisa_lab.pretrain.throughput import step_flops


def plan(config: PretrainConfig, corpus: Corpus, settings: Settings) -> list[str]:
    """Return lines that say what would be trained, on how much, with how much work."""
    micro = micro_batches(config, corpus, settings, 1)
    model = build(config, corpus.vocabulary.size)
    positional = model.transformer.num_parameters()[0]
    others = sum(p.numel() for p in model.parameters()) - positional
    chunk = next(corpus.chunks(Place()))
    lines = [
        f"{config.objective}, {config.position}: {others:,} parameters and {positional:,} of the "
        "position method",
        f"tokenizer {corpus.vocabulary.name}: {corpus.vocabulary.size:,} tokens",
    ]
    flops = 0.0
    for phase in config.phases():
        rows = Rows(chunk, phase.length, config.objective, corpus.vocabulary.specials, config.seed)
        count = config.batch_tokens // phase.length
        pieces = sum(len(row) for row in rows.pieces)
        squares = count * phase.length**2
        share = config.mask_share if config.objective == "mlm" else 1.0
        each = step_flops(
            model.config, config.batch_tokens, int(share * config.batch_tokens), squares
        )
        flops += (phase.end - phase.first) * each
        lines.append(
            f"{phase.end - phase.first:,} steps of {count} rows of {phase.length} tokens in "
            f"{micro} micro-batches (one process); {len(rows):,} rows and "
            f"{pieces / len(rows):.2f} pieces a row in the first {len(chunk.ends):,} documents"
        )
    lines.append(
        f"{config.steps * config.batch_tokens:,} tokens, at most {flops / 1e15:,.3g} PFLOP"
    )
    return lines
