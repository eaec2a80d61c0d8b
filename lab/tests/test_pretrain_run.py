"""A run from beginning to end, interrupted and gone on with."""

import os
import shutil
import signal

import numpy as np
import pytest
import torch

from little_corpus import text
from tisa.transformer import load
from tisa_lab.pretrain import checkpoints, training
from tisa_lab.pretrain.batches import ahead, steps, validation_batches
from tisa_lab.pretrain.config import Length, Phase, PretrainConfig, RunSettings
from tisa_lab.pretrain.corpus import StreamedCorpus
from tisa_lab.pretrain.model import (
    block_contrast,
    build,
    curves,
    observed,
    parameter_groups,
    step_flops,
)
from tisa_lab.pretrain.text import Bytes, Source
from tisa_lab.pretrain.training import Training, run
from tisa_lab.view import Silent

SIZES = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, embedding_size=8,
    lengths=(Length(32),), batch_tokens=128, learning_rate=1e-2, steps=10,
)  # fmt: skip
SETTINGS = RunSettings(
    device="cpu", log_every=2, evaluate_every=6, checkpoint_every=4, valid_tokens=600
)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.txt").write_text(text())
    return StreamedCorpus(Source((str(tmp_path / "corpus.txt"),)), Bytes(), chunk_tokens=900)


def losses_of(out):
    return np.load(out / "losses.npy")


@pytest.mark.parametrize("objective", ["mlm", "causal"])
def test_a_run_learns_and_goes_on_to_the_bit(corpus, tmp_path, objective):
    config = PretrainConfig(**SIZES | dict(objective=objective, dropout=0.1, steps=14))
    record = run(config, corpus, tmp_path / "whole", valid=corpus, settings=SETTINGS)
    first, last = record["evaluations"][0]["loss"], record["evaluations"][-1]["loss"]
    assert first == pytest.approx(np.log(260), abs=0.1)
    assert last < first - 0.2
    assert record["speed"]["tokens_per_second"] > 0
    assert record["parameters"]["positional"] == 2 * 2 * 15
    assert len(record["curves"]["scores"]) == 2
    # Stopped by a signal, by the clock, and by an error in the middle of an interval.
    out = tmp_path / "parts"
    stops = iter([False] * 4 + [True])
    assert (
        run(config, corpus, out, valid=corpus, settings=SETTINGS, stop=lambda: next(stops)) is None
    )
    assert checkpoints.all_of(out)[0].name == "step-00000005"
    soon = RunSettings(**vars(SETTINGS) | {"max_seconds": 1e-9})
    assert run(config, corpus, out, valid=corpus, settings=soon) is None
    assert checkpoints.all_of(out)[0].name == "step-00000006"
    take = Training.take
    with pytest.MonkeyPatch.context() as patched:

        def break_at_10(self, step, number, length):
            if number == 10:
                raise KeyboardInterrupt
            take(self, step, number, length)

        patched.setattr(Training, "take", break_at_10)
        with pytest.raises(KeyboardInterrupt):
            run(config, corpus, out, valid=corpus, settings=SETTINGS)
    again = run(config, corpus, out, valid=corpus, settings=SETTINGS)
    assert np.array_equal(losses_of(tmp_path / "whole"), losses_of(out))
    assert again["evaluations"] == record["evaluations"]
    one, other = load(tmp_path / "whole" / "model"), load(out / "model")
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    # Finished: nothing is trained again.
    assert run(config, corpus, out, valid=corpus, settings=SETTINGS) == again


def test_a_folder_in_which_somebody_trains_is_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "PATIENCE", 0.0)
    with (
        checkpoints.held(tmp_path / "run"),
        pytest.raises(BlockingIOError, match=rf"run: process {os.getpid()} on .* writes there"),
    ):
        run(PretrainConfig(**SIZES), corpus, tmp_path / "run", settings=SETTINGS)
    assert run(PretrainConfig(**SIZES), corpus, tmp_path / "run", settings=SETTINGS)


def test_micro_batches_change_nothing(corpus, tmp_path):
    config = PretrainConfig(**SIZES)
    run(config, corpus, tmp_path / "one", settings=SETTINGS)
    run(
        config,
        corpus,
        tmp_path / "four",
        settings=RunSettings(**vars(SETTINGS) | {"micro_tokens": 32}),
    )
    np.testing.assert_allclose(
        losses_of(tmp_path / "one"), losses_of(tmp_path / "four"), atol=1e-5, rtol=0
    )


def test_a_checkpoint_interrupted_while_writing_is_never_loaded(corpus, tmp_path, monkeypatch):
    config = PretrainConfig(**SIZES)
    run(config, corpus, tmp_path / "whole", settings=SETTINGS)
    out = tmp_path / "torn"
    finish = checkpoints.store.finish_folder

    def killed(unfinished, place, **more):
        if place.name == "step-00000008":
            # All is written but its name; half of the weights are lost.
            weights = unfinished / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:100])
            raise KeyboardInterrupt
        finish(unfinished, place, **more)

    monkeypatch.setattr(checkpoints.store, "finish_folder", killed)
    with pytest.raises(KeyboardInterrupt):
        run(config, corpus, out, settings=SETTINGS)
    assert (out / "checkpoints" / ".step-00000008.unfinished" / "model.safetensors").exists()
    assert checkpoints.all_of(out)[0].name == "step-00000004"
    monkeypatch.undo()
    run(config, corpus, out, settings=SETTINGS)
    assert np.array_equal(losses_of(tmp_path / "whole"), losses_of(out))
    left = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert left == ["step-00000004", "step-00000008"]


class Said(Silent):
    """Keeps what a run says."""

    def __init__(self):
        super().__init__()
        self.told = []

    def say(self, sentence, *, wrong=False):
        self.told.append(sentence)


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: cut(f / "model.safetensors"), "model.safetensors has 100 bytes and not"),
        (lambda f: flip(f / "optimizer.bin"), "optimizer.bin is damaged, bytes 0 to"),
        (lambda f: flip(f / "losses.npy"), "losses.npy is damaged"),
        (lambda f: (f / "random_states_0.pkl").unlink(), "random_states_0.pkl is missing"),
        (lambda f: (f / "manifest.json").unlink(), "its manifest.json is missing"),
        (lambda f: flip(f / "manifest.json"), "manifest.json: "),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(corpus, tmp_path, spoil, told):
    config, out, view = PretrainConfig(**SIZES | dict(dropout=0.1)), tmp_path / "run", Said()
    run(config, corpus, out, settings=SETTINGS)
    whole = losses_of(out)
    (out / "record.json").unlink()
    spoil(out / "checkpoints" / "step-00000008")
    run(config, corpus, out, settings=SETTINGS, view=view)
    assert "step-00000008" in view.told[0]
    assert told in view.told[0]
    assert view.told[1].endswith("step-00000004")
    assert np.array_equal(whole, losses_of(out))


def test_a_checkpoint_of_another_run_is_not_taken(corpus, tmp_path):
    """Of another seed, which has the same shapes."""
    config, out, view = PretrainConfig(**SIZES), tmp_path / "run", Said()
    other = PretrainConfig(**SIZES | dict(seed=1))
    run(config, corpus, out, settings=SETTINGS)
    run(other, corpus, tmp_path / "other", settings=SETTINGS)
    whole, foreign = losses_of(out), tmp_path / "other" / "checkpoints"
    (out / "record.json").unlink()
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    shutil.copytree(foreign / "step-00000008", out / "checkpoints" / "step-00000008")
    # Of another run's optimiser alone, too.
    run(config, corpus, out, settings=SETTINGS, view=view)
    assert "step-00000008: is of another run (other config); left aside" in view.told[0]
    assert np.array_equal(whole, losses_of(out))
    (out / "record.json").unlink()
    shutil.copy(foreign / "step-00000008" / "optimizer.bin", out / "checkpoints" / "step-00000008")
    view = Said()
    run(config, corpus, out, settings=SETTINGS, view=view)
    assert "optimizer.bin is damaged" in view.told[0]
    assert np.array_equal(whole, losses_of(out))


def test_where_no_checkpoint_is_whole_nothing_begins_anew_without_a_word(corpus, tmp_path):
    config, out = PretrainConfig(**SIZES), tmp_path / "run"
    run(config, corpus, out, settings=SETTINGS)
    (out / "record.json").unlink()
    for checkpoint in checkpoints.all_of(out):
        flip(checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match="got none of 2; remove the folder to begin from the"):
        run(config, corpus, out, settings=SETTINGS)


def test_trackers_are_told_the_config_and_the_losses(corpus, tmp_path, monkeypatch):
    from accelerate import tracking
    from accelerate.utils import LoggerType

    told = []

    class Tracker(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "wandb", False, None

        def __init__(self, run_name, **more):
            super().__init__()
            told.append(run_name)

        def store_init_configuration(self, values):
            told.append(values["position"])

        def log(self, values, step, **more):
            told.append((step, *values))

    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.WANDB])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Tracker)
    settings = RunSettings(**vars(SETTINGS) | {"report_to": ("wandb",), "log_every": 5})
    run(PretrainConfig(**SIZES), corpus, tmp_path / "run", valid=corpus, settings=settings)
    assert told[:3] == ["tisa-pretrain", "tisa", (0, "validation_loss")]
    assert [line[:2] for line in told[3:]] == [
        (5, "loss"), (6, "validation_loss"), (10, "loss"), (10, "validation_loss"),
    ]  # fmt: skip


def test_bert_schedule_and_the_table_of_positions(tmp_path):
    (tmp_path / "corpus.txt").write_text(text(longest=400))
    corpus = StreamedCorpus(Source((str(tmp_path / "corpus.txt"),)), Bytes())
    config = PretrainConfig(
        **SIZES
        | dict(
            position="absolute",
            lengths=(Length(64, 0.75), Length(256, 0.25)),
            steps=8,
            batch_tokens=512,
        )
    )
    assert [(p.first, p.end, p.length) for p in config.phases()] == [(0, 6, 64), (6, 8, 256)]
    settings = RunSettings(**vars(SETTINGS) | {"evaluate_every": 4})
    record = run(config, corpus, tmp_path / "run", settings=settings)
    table = np.load(tmp_path / "run" / "table.npy")
    assert table.shape == (256, 8)
    seen = [e["position"] for e in record["evaluations"]]
    assert seen[0]["r2"] == pytest.approx(seen[0]["chance"], abs=0.1)
    assert all(0 <= s["r2_off_diagonal"] <= 1 and 0 <= s["block"] <= 1 for s in seen)
    # At step 6 no row beyond 64 has been trained: those have only decayed.
    model = build(config, 260)
    assert "r2" in observed(model)
    torch.nn.init.zeros_(model.transformer.position.table.weight)
    assert observed(model)["r2"] is None


def test_blocks_are_seen():
    torch.manual_seed(0)
    smooth = torch.stack([torch.cos(torch.arange(512) / 20), torch.sin(torch.arange(512) / 20)], 1)
    assert block_contrast(smooth)["block"] < 0.05
    blocky = torch.zeros(512, 2)
    blocky[:128, 0], blocky[128:, 1] = 1.0, 0.3
    found = block_contrast(blocky)
    assert found["block"] == pytest.approx(1.0)
    assert (found["mean_first"], found["mean_between"]) == (1.0, 0.0)
    assert found["mean_others"] == pytest.approx(0.09)
    patterned = torch.randn(512, 8)
    patterned[128:] *= 0.01
    found = block_contrast(patterned)
    assert found["block"] < 0.05
    assert found["block_squares"] > 0.99
    assert block_contrast(torch.ones(512, 1))["block_squares"] == pytest.approx(1 / 16, abs=1e-3)


def test_every_method_starts_from_the_same_weights():
    states = {}
    others = ("absolute", "tisa", "tupe-a", "synthesizer-random")
    for name in ("none", *others):
        model = build(PretrainConfig(**SIZES | dict(position=name, seed=5)), 260)
        states[name] = {n: p for n, p in model.named_parameters() if "position" not in n}
    for name in others:
        # The synthesizer has no maps to queries and keys.
        missing = states["none"].keys() - states[name].keys()
        assert bool(missing) == (name == "synthesizer-random")
        assert states[name].keys() < states["none"].keys() or not missing
        assert all(torch.equal(states[name][n], states["none"][n]) for n in states[name])
    layers = [w for n, w in states["none"].items() if n.endswith("feed_forward.0.weight")]
    assert not any(torch.equal(layers[0], w) for w in layers[1:])
    other = build(PretrainConfig(**SIZES | dict(seed=6)), 260)
    assert not torch.equal(
        other.transformer.embeddings.weight, states["none"]["transformer.embeddings.weight"]
    )


def test_scores_learn_faster_and_do_not_decay():
    config = PretrainConfig(**SIZES)
    groups = parameter_groups(build(config, 260), config)
    assert [g["lr"] for g in groups] == [0.01, 0.01, 0.1]
    assert [g["weight_decay"] for g in groups] == [0.01, 0.0, 0.0]
    assert sum(p.numel() for p in groups[2]["params"]) == 60
    assert config.rate(0) == 1.0
    assert PretrainConfig(**SIZES | dict(steps=100)).rate(99) == pytest.approx(1 / 95)


def test_curves_are_the_scores():
    model = build(PretrainConfig(**SIZES), 260)
    found = curves(model, 32)
    scoring = model.transformer.position.scoring[1]
    expected = scoring.scores(torch.tensor(found["offsets"]))
    torch.testing.assert_close(torch.tensor(found["scores"][1]), expected, atol=1e-5, rtol=0)
    assert found["offsets"] == [-k for k in reversed(found["offsets"])]


def test_flops_by_hand():
    config = PretrainConfig(**SIZES).transformer(260)
    # Two rows of 32 tokens, ten labels.
    layer = 64 * (4 * 16 * 16 + 2 * 16 * 64) + 2 * 2 * 32 * 32 * 16
    head = 10 * (16 * 8 + 8 * 260) + 64 * 8 * 16
    assert step_flops(config, 64, 10, 2 * 32 * 32) == 3 * 2 * (2 * layer + head)


def test_validation_is_the_same_for_any_number_of_processes(corpus):
    config = PretrainConfig(**SIZES)

    def labels(processes):
        made = [
            validation_batches(corpus, config, 600, rows=3, rank=rank, processes=processes)
            for rank in range(processes)
        ]
        assert len({len(batches) for batches in made}) == 1
        found = torch.cat([b.labels for batches in made for b in batches])
        return sorted(found[found >= 0].tolist())

    assert labels(1) == labels(2) == labels(3) != []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(position="rotary"), "position: 'tisa' there, 'rotary' asked for"),
        (dict(seed=1), "seed: 0 there, 1 asked for"),
    ],
)
def test_the_folder_of_another_run_is_refused(corpus, tmp_path, change, message):
    config = PretrainConfig(**SIZES)
    checkpoints.write_run(tmp_path, training.identity_of(config, corpus, None, SETTINGS))
    with pytest.raises(ValueError, match=message):
        run(PretrainConfig(**SIZES | change), corpus, tmp_path, settings=SETTINGS)
    (tmp_path / "other.txt").write_text(text(seed=2))
    other = StreamedCorpus(Source((str(tmp_path / "other.txt"),)), Bytes())
    with pytest.raises(ValueError, match="another corpus"):
        run(config, other, tmp_path, settings=SETTINGS)
    with pytest.raises(ValueError, match="another validation"):
        run(config, corpus, tmp_path, valid=corpus, settings=SETTINGS)
    with pytest.raises(ValueError, match="another precision"):
        run(config, corpus, tmp_path, settings=RunSettings(**vars(SETTINGS) | {"bf16": True}))


def test_a_corpus_is_known_by_what_is_in_it(tmp_path):
    def fingerprint(folder, content, **source):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "corpus.txt").write_text(content)
        return StreamedCorpus(
            Source((str(tmp_path / folder / "corpus.txt"),), **source), Bytes()
        ).fingerprint

    first = fingerprint("a", "some words\n\nand others\n")
    assert fingerprint("b", "some words\n\nand others\n") == first
    assert fingerprint("b", "some words\n\nand another\n") != first
    assert fingerprint("b", "some words\n\nand  other\n") != first
    assert fingerprint("b", "some words\n\nand others\n", split="line") != first


def test_a_corpus_that_was_changed_in_its_middle_is_another(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(text(documents=14_000))

    def opened():
        return StreamedCorpus(Source((str(path),)), Bytes())

    config, first = PretrainConfig(**SIZES), opened()
    identity = training.identity_of(config, first, None, SETTINGS)
    checkpoints.write_run(tmp_path / "run", identity)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + b"#" + content[middle + 1 :])
    # What runs of before are known by does not see it.
    assert opened().fingerprint == first.fingerprint
    with pytest.raises(ValueError, match=r"another run \(another corpus_sha256\)"):
        run(config, opened(), tmp_path / "run", settings=SETTINGS)
    # Of a run of before nobody knows more.
    checkpoints.write_run(
        tmp_path / "run", {k: v for k, v in identity.items() if "sha256" not in k}
    )
    checkpoints.check_run(tmp_path / "run", training.identity_of(config, opened(), None, SETTINGS))


def test_another_version_of_the_code_goes_on_and_says_so(corpus, tmp_path, monkeypatch):
    class Said(Silent):
        def say(self, line, *, wrong=False):
            lines.append(line)

    lines = []
    config, stopped = PretrainConfig(**SIZES), iter([False] * 5 + [True])
    monkeypatch.setattr(training, "code", lambda: "version 1")
    run(config, corpus, tmp_path, settings=SETTINGS, stop=lambda: next(stopped), view=Said())
    assert not any("trained with" in line for line in lines)
    monkeypatch.setattr(training, "code", lambda: "version 2")
    record = run(config, corpus, tmp_path, settings=SETTINGS, view=Said())
    assert record["code"] == ["version 1", "version 2"]
    (told,) = [line for line in lines if "trained with" in line]
    assert told.startswith("it was trained with version 1 so far, and goes on with version 2")


def test_a_checkpoint_that_could_not_be_proved_ends_the_run(corpus, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.store, "seal_folder", full)
    with pytest.raises(OSError, match=r"step-00000004: could not be written"):
        run(PretrainConfig(**SIZES), corpus, tmp_path, settings=SETTINGS)
    assert checkpoints.all_of(tmp_path) == []


def test_a_run_takes_nothing_over_from_the_one_before(corpus, tmp_path):
    config = PretrainConfig(**SIZES)
    for name, bf16 in (("plain", False), ("half", True), ("again", False)):
        record = run(
            config, corpus, tmp_path / name, settings=RunSettings(**vars(SETTINGS) | {"bf16": bf16})
        )
        assert record["precision"] == ("bf16" if bf16 else "no")
    plain, half, again = (losses_of(tmp_path / name) for name in ("plain", "half", "again"))
    assert np.array_equal(plain, again)
    assert not np.array_equal(plain, half)
    np.testing.assert_allclose(plain, half, atol=0.05)


def test_steps_are_the_same_from_a_process_of_their_own(corpus):
    def make():
        return steps(corpus, [Phase(0, 3, 32)], batch_tokens=128, objective="mlm", mask_share=0.15,
                     seed=0)  # fmt: skip

    here, there = list(ahead(make, in_a_process=False)), list(ahead(make, in_a_process=True))
    assert [step.after for step in here] == [step.after for step in there]
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.batches[0].input_ids, other.batches[0].input_ids)
        assert torch.equal(one.batches[0].labels, other.batches[0].labels)


def test_a_signal_to_all_processes_leaves_the_steps_to_the_trainer(corpus):
    def make():
        return steps(corpus, [Phase(0, 40, 32)], batch_tokens=128, objective="mlm",
                     mask_share=0.15, seed=0)  # fmt: skip

    found = ahead(make, in_a_process=True)
    next(found)
    # As torchrun and scancel do; Ctrl-C reaches all of them too.
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(found._workers[0].pid, number)
    assert len(list(found)) == 39


@pytest.mark.full
@pytest.mark.unchecked
def test_a_compiled_run_goes_on(corpus, tmp_path):
    config = PretrainConfig(**SIZES)
    settings = RunSettings(**vars(SETTINGS) | {"compile": True})
    run(config, corpus, tmp_path / "plain", settings=SETTINGS)
    torch._dynamo.utils.counters.clear()
    stops = iter([False] * 4 + [True])
    out = tmp_path / "compiled"
    assert run(config, corpus, out, settings=settings, stop=lambda: next(stops)) is None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert run(config, corpus, out, settings=settings) is not None
    np.testing.assert_allclose(losses_of(tmp_path / "plain"), losses_of(out), atol=1e-4, rtol=0)
    assert load(out / "model").config.position == "tisa"


@pytest.mark.full
@pytest.mark.unchecked
def test_earlier_runs_in_this_process_do_not_keep_one_from_being_compiled(corpus, tmp_path):
    settings = RunSettings(**vars(SETTINGS) | {"compile": True})
    # What one run needs: its first shape, then any.
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for method in ("none", "absolute", "rotary"):
            config = PretrainConfig(**SIZES | {"position": method})
            assert run(config, corpus, tmp_path / method, settings=settings) is not None
