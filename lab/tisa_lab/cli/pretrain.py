"""`tisa-lab pretrain`: a masked or causal language model with any position method."""

import json
import signal
from pathlib import Path
from typing import Any


def command(
    *,
    data: list[str] | None = None,
    dataset: str | None = None,
    tokenizer: str | None = None,
    out: Path | None = None,
    valid: str | None = None,
    prepare: Path | None = None,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    split: str = "blank",
    text_column: str = "text",
    objective: str = "mlm",
    position: str = "tisa",
    position_options: str = "{}",
    hidden: int = 512,
    layers: int = 4,
    heads: int = 8,
    embedding: int = 128,
    share_layers: bool = False,
    norm: str = "pre",
    dropout: float = 0.0,
    lengths: str = "512",
    max_length: int | None = None,
    steps: int = 1000,
    batch_tokens: int = 32768,
    micro_tokens: int | None = None,
    learning_rate: float = 0.001,
    scores_learning_rate: float | None = None,
    warmup: float = 0.05,
    weight_decay: float = 0.01,
    mask_share: float = 0.15,
    seed: int = 0,
    evaluate_every: int = 500,
    checkpoint_every: int = 500,
    log_every: int = 10,
    valid_tokens: int = 500000,
    max_seconds: float | None = None,
    bf16: bool = False,
    compile_: bool = False,
    compile_mode: str = "default",
    report_to: str = "",
    device: str | None = None,
    peak_flops: float | None = None,
    as_json: bool = False,
    dry_run: bool = False,
) -> None:
    """Pretrain a language model with any position method.

    Packed rows without attention between documents; goes on after any interruption; under
    `torchrun` or `accelerate launch` on several processes. OUT/model is the model, OUT/record.json
    the numbers.

    Examples: `tisa-lab pretrain --data train.txt --tokenizer bytes --out run`,
    `tisa-lab pretrain --data wiki.txt.xz --tokenizer spiece.model --prepare wiki`,
    `accelerate launch -m tisa_lab.cli pretrain --data wiki --position rotary --bf16 --out rotary`

    Args:
        data: Files (.txt, .txt.xz, .parquet; repeat it), or one prepared folder.
        dataset: Instead of files: NAME[:CONFIG[:SPLIT]] on the hub.
        tokenizer: bytes, a SentencePiece file (*.model), or what transformers loads.
        out: Folder of the run.
        valid: Held-out documents: a file or a prepared folder.
        prepare: Only cut the corpus into tokens, into this folder, for --data.
        min_tokens: With --prepare: no shorter documents.
        max_tokens: With --prepare: only documents below it.
        split: What ends a document in a text file: blank, line, file.
        text_column: Of Parquet files and datasets.
        objective: mlm: an encoder; causal: a decoder.
        position: The position method, by name.
        position_options: Its arguments as JSON, as in '{"layers": "shared"}'.
        hidden: Width.
        layers: Layers, or passes through the shared one.
        heads: Attention heads.
        embedding: Width of the embeddings (ALBERT).
        share_layers: One layer's weights for all (ALBERT).
        norm: pre or post.
        dropout: Of hidden states and attention.
        lengths: Tokens in a row; BERT's schedule is 128:0.9,512:0.1.
        max_length: Positions of methods that have a table; the longest row.
        steps: Updates.
        batch_tokens: Of all processes together.
        micro_tokens: A process takes so many at a time; accumulates.
        learning_rate: Its peak.
        scores_learning_rate: Of scores of the offset; ten times the other.
        warmup: Share of the steps.
        weight_decay: Not of biases, norms, scores.
        mask_share: Share of the tokens to predict.
        seed: Of weights, order and masks.
        evaluate_every: Steps.
        checkpoint_every: Steps.
        log_every: Steps.
        valid_tokens: Of the held-out documents.
        max_seconds: Write a checkpoint then, and stop; from its start.
        bf16: bfloat16 products (autocast).
        compile_: torch.compile.
        compile_mode: reduce-overhead: CUDA graphs.
        report_to: Trackers of accelerate: tensorboard, wandb, …, with commas.
        device: cpu or cuda; by default a GPU where there is one.
        peak_flops: Of a device that is not known, for the MFU.
        as_json: Print the record.
        dry_run: Check everything, print the plan, train nothing.
    """
    from tisa_lab.pretrain.checkpoints import check_run
    from tisa_lab.pretrain.config import PretrainConfig, RunSettings
    from tisa_lab.pretrain.corpus import CorpusNames
    from tisa_lab.pretrain.launching import check_corpora, check_settings, is_first_process, plan
    from tisa_lab.pretrain.training import identity_of, run
    from tisa_lab.record import command_line
    from tisa_lab.view import view_for

    names = CorpusNames(data or [], dataset, tokenizer, split, text_column)  # type: ignore[arg-type]
    if prepare is not None:
        made = names.prepare(prepare, min_tokens=min_tokens, max_tokens=max_tokens)
        count, tokens = len(made.ends), int(made.ends[-1])
        found = {"documents": count, "tokens": tokens, "folder": str(prepare)}
        line = f"{count:,} documents, {tokens:,} tokens in {prepare}"
        print(json.dumps(found) if as_json else line)
        return
    if out is None:
        raise ValueError("--out: expected the folder of the run, got none")
    config = PretrainConfig(
        objective=objective, position=position, position_options=_options(position_options),  # type: ignore[arg-type]
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        embedding_size=embedding, share_layers=share_layers, norm=norm, dropout=dropout,  # type: ignore[arg-type]
        max_position_embeddings=max_length, lengths=_lengths(lengths), steps=steps,
        batch_tokens=batch_tokens, learning_rate=learning_rate,
        scores_learning_rate=scores_learning_rate, warmup=warmup, weight_decay=weight_decay,
        mask_share=mask_share, seed=seed,
    )  # fmt: skip
    settings = RunSettings(
        micro_tokens=micro_tokens, device=device, bf16=bf16, compile=compile_,  # type: ignore[arg-type]
        compile_mode=compile_mode, report_to=tuple(p for p in report_to.split(",") if p),
        log_every=log_every, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every,
        valid_tokens=valid_tokens, max_seconds=max_seconds, peak_flops=peak_flops,
    )  # fmt: skip
    corpus, save_tokenizer = names.open()
    held_out = None if valid is None else names.beside(valid)
    check_settings(settings)
    check_corpora(config, corpus, held_out)
    if dry_run:
        check_run(out, identity_of(config, corpus, held_out, settings))
        lines = plan(config, corpus, settings)
        print(json.dumps(lines, ensure_ascii=False) if as_json else "\n".join(lines))
        return
    first = is_first_process(settings)
    with _Stopping() as stopping, view_for(shown=first) as view:
        record = run(
            config, corpus, out, valid=held_out, settings=settings, view=view,
            command=command_line(), stop=stopping,
            save_tokenizer=save_tokenizer,
        )  # fmt: skip
    if record is None and stopping.asked == signal.SIGINT:
        raise SystemExit(130)
    if as_json and record is not None and first:
        print(json.dumps(record, ensure_ascii=False))


class _Stopping:
    """Whether Ctrl-C was pressed or the job was told to end; a second time ends it at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked: int | None = None

    def __enter__(self) -> "_Stopping":
        self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = number
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    def __call__(self) -> bool:
        return self.asked is not None


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"--position-options: expected an object in JSON, got {text!r}")
    return found


def _lengths(text: str) -> Any:
    from tisa_lab.pretrain.config import Length

    try:
        pairs = [part.split(":") for part in text.split(",")]
        if len(pairs) == 1 and len(pairs[0]) == 1:
            return (Length(int(pairs[0][0])),)
        return tuple(Length(int(length), float(share)) for length, share in pairs)
    except ValueError:
        raise ValueError(
            f"--lengths: expected 512, or lengths and shares as in 128:0.9,512:0.1, got {text!r}"
        ) from None
