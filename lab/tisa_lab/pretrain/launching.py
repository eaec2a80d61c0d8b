"""Where a run takes place: `accelerate`, what does not fit is refused, and what it will cost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tisa.packages import device_named, needed
from tisa_lab.pretrain.batches import Rows, Share
from tisa_lab.pretrain.config import PretrainConfig, Recipe, RunSettings
from tisa_lab.pretrain.corpus import Corpus, Place
from tisa_lab.pretrain.model import build, step_flops


def is_first_process(settings: RunSettings) -> bool:
    """Return whether this is the process that speaks for all."""
    return bool(_accelerate().PartialState(cpu=settings.device == "cpu").is_main_process)


def precision_of(settings: RunSettings) -> str:
    """Return what products are computed in, as accelerate names it; its launcher may have said."""
    found = _accelerate().utils.parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no")
    return "bf16" if settings.bf16 else str(found)


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


def plan(config: PretrainConfig, corpus: Corpus, settings: RunSettings) -> list[str]:
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


def from_main(accelerator: Any, made: Callable[[], Any]) -> Any:
    """Return in every process what the main process makes."""
    found = [made() if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        _accelerate().utils.broadcast_object_list(found)
    return found[0]


def _accelerate() -> Any:
    return needed("accelerate", "pretraining", "tisa-lab")
