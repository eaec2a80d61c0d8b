"""Where a run takes place: `accelerate`, and what is set for a machine rather than for a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tisa_lab.pretrain.batches import Share
from tisa_lab.pretrain.config import PretrainConfig
from tisa_lab.pretrain.corpus import Corpus, Place
from tisa_lab.pretrain.rows import Rows


@dataclass(frozen=True)
class Settings:
    """How a run is carried out.

    `micro_tokens` are the tokens that a process takes at a time (None: all of its share); the rest
    is accumulated. `device` "cpu" keeps it from the GPU. `compile_mode` is that of torch.compile.
    `report_to` are trackers of accelerate.
    """

    micro_tokens: int | None = None
    device: str | None = None
    bf16: bool = False
    compile: bool = False
    compile_mode: str = "default"
    report_to: tuple[str, ...] = ()
    log_every: int = 10
    evaluate_every: int = 500
    checkpoint_every: int = 500
    valid_tokens: int = 500_000
    max_seconds: float | None = None
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        for name in ("log_every", "evaluate_every", "checkpoint_every", "valid_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.micro_tokens is not None and self.micro_tokens < 1:
            raise ValueError(f"micro_tokens must be at least 1, got {self.micro_tokens}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds must be more than 0, got {self.max_seconds}")


DEFAULTS = Settings()


def is_first_process(settings: Settings) -> bool:
    """Return whether this is the process that speaks for all."""
    check_settings(settings)
    return bool(_accelerate().PartialState(cpu=settings.device == "cpu").is_main_process)


def precision_of(settings: Settings) -> str:
    """Return what products are computed in, as accelerate names it; its launcher may have said."""
    found = _accelerate().utils.parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no")
    return "bf16" if settings.bf16 else str(found)


def accelerator_for(settings: Settings, out: Path) -> Any:
    """Return the accelerator; what its launcher says (processes, FSDP) holds."""
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
    return made


def trackers_of(accelerator: Any, settings: Settings, config: PretrainConfig) -> None:
    """Start the trackers that were asked for."""
    if settings.report_to:
        plain = {
            name: value if isinstance(value, (int, float, str, bool)) else str(value)
            for name, value in config.to_dict().items()
        }
        accelerator.init_trackers("tisa-pretrain", config=plain)


def micro_batches(
    config: PretrainConfig, corpus: Corpus, settings: Settings, processes: int
) -> int:
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


def check_settings(settings: Settings) -> None:
    """Refuse a device or a tracker that is not there."""
    if settings.device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {settings.device!r}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected a GPU for cuda, got none on this machine")
    accelerate = _accelerate()
    known = accelerate.utils.LoggerType.list()
    unknown = set(settings.report_to) - set(known)
    if unknown:
        raise ValueError(
            f"--report-to: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}"
        )
    # Not `filter_trackers`: it logs what is missing, which accelerate refuses before a run begins.
    there = {tracker.value for tracker in accelerate.tracking.get_available_trackers()}
    missing = set(settings.report_to) - there - {"all"}
    if missing:
        # No ImportError: to those the command line adds an extra of ours, which has no tracker.
        raise ValueError(
            f"--report-to: {', '.join(sorted(missing))} cannot be used here; install the package "
            "of that name"
        )


def _accelerate() -> Any:
    try:
        import accelerate
    except ImportError as missing:
        raise ImportError(
            'pretraining runs on accelerate, which is not installed; run: pip install "tisa-lab"'
        ) from missing
    return accelerate
