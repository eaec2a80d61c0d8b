"""What a run has before its first step, and what is asked of its model later.

The model with its loss, parameter groups and work; `accelerate` around them; what does not fit and
is refused, what the run will cost; at last what the model knows about position.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from tisa.packages import device_named, needed
from tisa.parameters import grouped, of_scoring
from tisa.positions import build_position, resolve
from tisa.positions.from_scoring import FromScoring
from tisa.scoring import ScoringFunction
from tisa.shapes import Float, Int, Int32, Tensor
from tisa.transformer import LanguageModel, TransformerConfig
from tisa.transformer.model import initialise
from tisa_lab.pretrain.batches import NO_LABEL, Rows, Share, key_of
from tisa_lab.pretrain.config import PretrainConfig, Recipe, RunSettings
from tisa_lab.pretrain.corpus import Corpus, Place

# Dense bfloat16 products with float32 sums, FLOP/s, as the manufacturer states them.
PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12,
         "L40S": 362e12, "RTX 4090": 165e12}  # fmt: skip
BLOCK = 128


class WithLoss(nn.Module):
    """A language model whose output is the summed loss: what is compiled, sharded, replicated."""

    # For accelerate's wrapping by layer.
    _no_split_modules = ("Block",)

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Int[Tensor, " total"],
        cu_seqlens: Int32[Tensor, " ends"],
        positions: Int[Tensor, " places"],
        labels: Int[Tensor, " places"],
        max_seqlen: int,
    ) -> Float[Tensor, ""]:
        """Return the sum of the losses of all labels."""
        hidden = self.model.transformer(input_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        if not self.model.config.is_causal:
            hidden = hidden.index_select(0, positions)
        logits = self.model.head(hidden).float()
        return cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")


def build(config: PretrainConfig, vocab_size: int) -> LanguageModel:
    """Return the model at step 0.

    The same seed gives the same weights to every method: they are drawn by the name of their map,
    so that a method which has fewer maps changes none of the others.
    """
    model = LanguageModel(config.transformer(vocab_size))
    for name, part in model.named_modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            torch.manual_seed(int(key_of(config.seed, crc32(name.encode()))[0]))
            initialise(part, model.config.initializer_range)
    torch.manual_seed(config.seed + 1_000_003)
    model.transformer.position = build_position(
        model.config.position, model.config.position_config()
    )
    return model


def parameter_groups(model: nn.Module, config: PretrainConfig) -> list[dict[str, Any]]:
    """Return weights, weights without decay (biases, norms) and scores, with their rates."""
    groups = grouped(
        model, of_scoring(model), lr=config.learning_rate,
        scores_lr=config.scores_learning_rate, weight_decay=config.weight_decay,
    )  # fmt: skip
    return [group | {"peak": group["lr"]} for group in groups]


def step_flops(config: TransformerConfig, tokens: int, labels: int, squares: int) -> float:
    """Return the floating-point operations of a step: 3 × those of its forward pass.

    Matrix products only, two operations for each multiplication, nothing for what is recomputed;
    `squares` is Σ (length of a piece)², of which a causal model needs half. Position methods with
    products of their own (Shaw, FLOATER) are counted like the others, and windows as if
    they had no end.
    """
    width, inner = config.hidden_size, config.feed_forward_size
    layer = 2 * (4 * width * width + 2 * width * inner)
    seen = squares / 2 if config.is_causal else squares
    attention = 4 * width * seen
    head = 2 * config.embedding_width * config.vocab_size
    if config.embedding_size is not None or not config.is_causal:
        head += 2 * width * config.embedding_width
    widen = 0 if config.embedding_size is None else 2 * width * config.embedding_size
    body = config.num_hidden_layers * (layer * tokens + attention) + widen * tokens
    return 3.0 * (body + head * labels)


def peak_flops(device: torch.device) -> float | None:
    """Return what the device can do in bfloat16, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def accelerator_for(settings: RunSettings, config: PretrainConfig, out: Path) -> Any:
    """Return the accelerator, its trackers started; what its launcher says (FSDP) holds."""
    check_settings(settings)
    accelerate = _accelerate()
    # The precision and compiler of a run before it in this process would be kept; its group is.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=False)
    more: dict[str, Any] = {}
    if settings.compile:
        # The models of earlier runs in this process count too: the ninth would train uncompiled.
        torch.compiler.reset()
        more["dynamo_plugin"] = accelerate.utils.TorchDynamoPlugin(
            backend="inductor", mode=settings.compile_mode
        )
    made = accelerate.Accelerator(
        cpu=settings.device == "cpu",
        mixed_precision=precision_of(settings),
        log_with=list(settings.report_to) or None,
        project_dir=str(out),
        **more,
    )
    sharding = getattr(made.state, "fsdp_plugin", None)
    if sharding is not None:
        # Autocast computes in bfloat16; FSDP's own policy would round the scores' parameters too.
        sharding.mixed_precision_policy = None
    if settings.report_to:
        plain = {
            name: value if isinstance(value, (int, float, str, bool)) else str(value)
            for name, value in config.to_dict().items()
        }
        made.init_trackers("tisa-pretrain", config=plain)
    return made


def check_settings(settings: RunSettings) -> None:
    """Refuse a device or a tracker that is not there."""
    device_named(settings.device)
    accelerate = _accelerate()
    known = accelerate.utils.LoggerType.list()
    unknown = set(settings.report_to) - set(known)
    if unknown:
        raise ValueError(
            f"report_to: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}"
        )
    # Not `filter_trackers`: it logs what is missing, which accelerate refuses before a run begins.
    there = {tracker.value for tracker in accelerate.tracking.get_available_trackers()}
    missing = set(settings.report_to) - there - {"all"}
    if missing:
        # No ImportError: to those the command line adds an extra of ours, which has no tracker.
        raise ValueError(
            f"report_to: {', '.join(sorted(missing))} cannot be used here; install the package of "
            "that name"
        )


def precision_of(settings: RunSettings) -> str:
    """Return what products are computed in, as accelerate names it; its launcher may have said."""
    found = _accelerate().utils.parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no")
    return "bf16" if settings.bf16 else str(found)


def is_first_process(settings: RunSettings) -> bool:
    """Return whether this is the process that speaks for all."""
    return bool(_accelerate().PartialState(cpu=settings.device == "cpu").is_main_process)


def from_main(accelerator: Any, made: Callable[[], Any]) -> Any:
    """Return in every process what the main process makes."""
    found = [made() if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        _accelerate().utils.broadcast_object_list(found)
    return found[0]


def lost_process(
    wrong: RuntimeError, step: int, checkpoint: Path | None, share: Share
) -> Exception:
    """Return an error that says what to do where another process is gone, else the same error."""
    signs = ("Connection closed by peer", "Connection reset", "NCCL", "gloo", "Broken pipe")
    if share.processes == 1 or not any(sign.lower() in str(wrong).lower() for sign in signs):
        return wrong
    where = f"from {checkpoint}" if checkpoint else "from the beginning: there is no checkpoint yet"
    first = str(wrong).strip().splitlines()[0]
    return ConnectionError(
        f"another of the {share.processes} processes is gone after step {step:,} ({first}); start "
        f"the same command again, it goes on {where}"
    )


def check_corpora(config: Recipe, corpus: Corpus, valid: Corpus | None) -> None:
    """Refuse what would fail later: a vocabulary without a mask, two tokenizers."""
    if config.objective == "mlm" and corpus.vocabulary.specials.mask is None:
        raise ValueError(
            f"tokenizer {corpus.vocabulary.name!r}: a masked language model needs a mask token, "
            "which it does not have; take another one, or the objective causal"
        )
    if valid is not None and valid.vocabulary.fingerprint != corpus.vocabulary.fingerprint:
        raise ValueError(
            f"the validation corpus was prepared with the tokenizer {valid.vocabulary.name!r} "
            f"({valid.vocabulary.fingerprint}), the training corpus with "
            f"{corpus.vocabulary.name!r} ({corpus.vocabulary.fingerprint}); prepare it again"
        )


def micro_batches(config: Recipe, corpus: Corpus, settings: RunSettings, processes: int) -> int:
    """Return into how many micro-batches a process cuts its share, or refuse what does not fit.

    Refuses also a corpus with fewer documents than processes, or fewer rows than a step.
    """
    chunks = corpus.chunks(Place())
    first = next(chunks)
    documents = len(first.ends)
    while documents < processes:
        following = next(chunks)
        if following.place.epoch:
            raise ValueError(
                f"corpus: expected at least as many documents as processes ({processes}), got "
                f"{documents}; start fewer processes"
            )
        documents += len(following.ends)
    micro = 1
    for length, _ in config.lengths:
        rows = config.batch_tokens // length
        if rows % processes:
            raise ValueError(
                f"batch_tokens: expected rows of {length} tokens for {processes} processes alike, "
                f"got {rows} rows ({config.batch_tokens} tokens)"
            )
        share = rows // processes * length
        if settings.micro_tokens is not None:
            if settings.micro_tokens % length or share % settings.micro_tokens:
                raise ValueError(
                    f"micro_tokens: expected a multiple of {length} and a divisor of {share}, the "
                    f"share of a process, got {settings.micro_tokens}"
                )
            micro = share // settings.micro_tokens
        there = len(Rows(first, length, config.objective, corpus.vocabulary.specials, 0))
        if there < rows and next(corpus.chunks(first.next)).place.epoch > 0:
            raise ValueError(
                f"corpus: expected at least the {rows} rows of {length} tokens of one step, got "
                f"{there}; a smaller batch or a larger corpus"
            )
    return micro


def plan(config: PretrainConfig, corpus: Corpus, settings: RunSettings) -> list[str]:
    """Return lines that say what would be trained, on how much, with how much work."""
    micro = micro_batches(config, corpus, settings, 1)
    model = build(config, corpus.vocabulary.size)
    positional = model.transformer.num_parameters()[0]
    others = sum(p.numel() for p in model.parameters()) - positional
    chunk = next(corpus.chunks(Place()))
    lines = [
        f"{config.objective}, {resolve(config.position).name}: {others:,} parameters and "
        f"{positional:,} of the position method",
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


def position_table(model: LanguageModel) -> Float[Tensor, "positions width"] | None:
    """Return the learned vectors of positions, None where the method has none."""
    table = model.transformer.position.vectors()
    if table is None:
        return None
    whole = table.full_tensor() if isinstance(table, DTensor) else table
    return whole.detach().float().cpu()


def observed(model: LanguageModel) -> dict[str, Any]:
    """Return the Toeplitz R² of P beside chance, and how far P looks like blocks of 128."""
    table = position_table(model)
    if table is None:
        return {}
    # Not before it is needed: it brings the whole of the analysis.
    from tisa.analysis.toeplitz import toeplitz_r2

    null = _null(*table.shape)
    whole, off = (toeplitz_r2(table, off_diagonal=o) for o in (False, True))
    return {
        "r2": None if math.isnan(whole) else whole,
        "r2_off_diagonal": None if math.isnan(off) else off,
        "chance": null.whole,
        "chance_off_diagonal": null.off_diagonal,
        **block_contrast(table),
    }


def block_contrast(table: Float[Tensor, "positions width"]) -> dict[str, float]:
    """Return how far the first 128 positions are a block of P: means in it, beside it, around it.

    `block` is the share of P's variance off the diagonal that these three means explain: near 0
    for a Toeplitz matrix of short range, large where the block is of one brightness.
    `block_squares` is the share of all squares off the diagonal that lie in it, whatever its
    pattern: of 512 positions it has a sixteenth of the places, and of a Toeplitz matrix of short
    range a fourth of the squares.
    """
    if table.shape[0] < 2 * BLOCK:
        return {}
    gram = (table @ table.T).double()
    inside = torch.arange(table.shape[0]) < BLOCK
    pairs = inside.long()[:, None] + inside.long()[None, :]
    off = ~torch.eye(table.shape[0], dtype=torch.bool)
    total = gram[off].var(correction=0)
    fitted = torch.zeros_like(gram)
    found = {}
    for name, number in (("others", 0), ("between", 1), ("first", 2)):
        here = (pairs == number) & off
        found[f"mean_{name}"] = float(gram[here].mean())
        fitted[here] = gram[here].mean()
    found["block"] = float(fitted[off].var(correction=0) / total) if total > 0 else 0.0
    squares = gram.square() * off
    found["block_squares"] = float(squares[:BLOCK, :BLOCK].sum() / squares.sum().clamp_min(1e-300))
    norms = table.norm(dim=1)
    found["norm_first"] = float(norms[inside].mean())
    found["norm_others"] = float(norms[~inside].mean())
    return found


def curves(model: LanguageModel, farthest: int) -> dict[str, Any]:
    """Return every head's score at near and some far offsets, {} for other methods; on the CPU."""
    # A method with gates has its curve in a part.
    position = getattr(model.transformer.position, "curve", model.transformer.position)
    if not isinstance(position, FromScoring):
        return {}
    near = torch.arange(-64, 65)
    far = torch.unique(torch.logspace(6, 13, 57, base=2.0).round().long())
    far = far[(far > 64) & (far <= max(128, 8 * farthest))]
    offsets = torch.cat((-far.flip(0), near, far))
    scores = []
    for scoring in position.scoring:
        assert isinstance(scoring, ScoringFunction)
        with torch.no_grad():
            scores.append(scoring.scores(offsets))
    return {
        "offsets": offsets.tolist(),
        "scores": [[[round(v, 5) for v in head] for head in s.tolist()] for s in scores],
    }


@lru_cache(maxsize=4)
def _null(positions: int, width: int) -> Any:
    from tisa.analysis.resampling import gaussian_null

    return gaussian_null(positions, width, draws=3)


def _accelerate() -> Any:
    return needed("accelerate", "pretraining", "tisa-lab")
