"""Every type of the installed transformers: is a conversion right, or refused with a true reason?

    python tests/hf/sweep.py [--shard 0/1] [--types bert,…] [--out record.json]

Each type runs in a process of its own, for `SECONDS` at most. A cell of the record is "exact", or
"refused: …" with the sentence, or "wrong: …", of which there may be none.

keep     positions="keep", init="zero": output, gradients and generated logits are stock's; scores
         of every layer are used; saved and loaded the same
replace  positions="replace": exact where the table is the same at every place; fitted to a table
         that is not, finite on 200 tokens, saved and loaded the same, a cache changes nothing
stock    attn_implementation="tisa" on the model as it is

Exact: an error of at most twice that of stock's own code (the worst of "eager" and "sdpa"), both
against stock in float64, and of 1e-5 of the largest number, of gradients 1e-4, for cases in which
that code has luck.
"""

import argparse
import contextlib
import copy
import json
import multiprocessing
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import transformers
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

import tisa
import tisa.hf
from any_type import build, model_classes, takes_tokens, tokens_for
from tisa.hf import families, implementations
from tisa.hf.core import OwnScores

SECONDS = 120
LUCK = {"output": 1e-5}  # of a gradient 1e-4
NEAR = 1e-4


class WrongError(Exception):
    """What must not be."""


def output(model, given):
    """Return what a model makes of real tokens."""
    made = model(**given)
    values = (getattr(made, name, None) for name in ("logits", "last_hidden_state"))
    found = next((v for v in values if v is not None), None)
    if found is None:
        found = next(v for v in made.to_tuple() if torch.is_tensor(v))
    mask = given.get("decoder_input_ids", given["input_ids"]) != 1
    return found[mask] if found.shape[:2] == mask.shape else found


def measured(model, given):
    """Return the output and the gradient of every parameter by name."""
    model.zero_grad()
    found = output(model, given)
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    # Some stock code cannot be trained.
    with contextlib.suppress(RuntimeError):
        (found * weights.cos()).sum().backward()
    gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return {"output": found.detach()} | gradients


def references(model, given):
    """Return stock's numbers in float64 (in float32 where that fails), and its own attempts."""
    plain = []
    for implementation in ("eager", "sdpa"):
        try:
            model.set_attn_implementation(implementation)
        except ValueError:
            continue
        plain.append(measured(model, given))
    model.set_attn_implementation("eager")
    try:
        exact = measured(copy.deepcopy(model).double(), given)
    except RuntimeError:
        return plain[0], plain
    # Rows that see nothing are NaN in some families' float64.
    return {k: v if v.isfinite().all() else plain[0][k] for k, v in exact.items()}, plain


def assert_exact(found, exact, plain, names=None):
    """Compare all that was measured with stock's numbers."""
    exact = {name: value.double() for name, value in exact.items() if value.numel()}
    largest = {name: float(value.abs().max()) for name, value in exact.items()}
    whole = max([size for name, size in largest.items() if name != "output"], default=0.0)
    for name in names or exact:
        if name not in found:
            raise WrongError(f"{name} has no gradient")
        size = largest[name] if name == "output" else max(largest[name], whole / 10)
        errors = [float((f[name].double() - exact[name]).abs().max()) for f in (found, *plain)]
        if not errors[0] <= 2 * max(errors[1:]) + LUCK.get(name, NEAR) * size:
            raise WrongError(f"{name} is off by {errors[0]:.1e} of {largest[name]:.1e}")


def generated(model, given, **settings):
    """Return the logits of a greedy continuation, or None where stock has none."""
    ids = given["input_ids"][1:]
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4,
        do_sample=False, pad_token_id=1, output_logits=True, return_dict_in_generate=True,
        **settings,
    )  # fmt: skip
    return torch.stack(made.logits)


def assert_near(found, expected, what):
    """Compare two of ours."""
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
    if not error <= NEAR:
        raise WrongError(f"{what} is off by {error:.1e}")


def assert_same_generation(one, other, given):
    """Compare what both generate with a cache, if stock can."""
    if not one.can_generate():
        return
    try:
        expected = generated(one, given)
    except Exception:
        return
    assert_near(generated(other, given), expected, "generated")


def sees_no_later(model, given):
    """Return whether the first tokens' output is the same without the last."""
    first = {"input_ids": given["input_ids"][1:, :4]}
    with torch.no_grad():
        short, whole = model(**first)[0], model(input_ids=given["input_ids"][1:])[0]
    return torch.allclose(short, whole[:, :4], atol=1e-3)


def assert_no_place(ours, given):
    """Put hidden tokens before the others, few and more, which those must not notice."""
    ids, found = given["input_ids"][1:], []
    for count in (5, 11):
        hidden = torch.full((1, count), 20)
        mask = torch.cat((torch.zeros_like(hidden), torch.ones_like(ids)), 1)
        moved = {"input_ids": torch.cat((hidden, ids), 1), "attention_mask": mask}
        with torch.no_grad():
            found.append(output(ours, moved))
    if len(found[0]) == 5 + ids.numel():
        assert_near(found[1][11:], found[0][5:], "further on")


def assert_saved(ours, given):
    """Compare the model with itself after saving and loading."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        ours.save_pretrained(folder)
        stock = type(ours).stock
        loaded = tisa.hf.load(folder, model_class=stock).eval()
        loaded.set_attn_implementation(ours.config._attn_implementation)
        assert_near(output(loaded, given), output(ours, given), "loaded")


def assert_used(ours, given, allowed):
    """Give every head scores: every layer must use them, every implementation alike."""
    owners = [m for m in ours.modules() if isinstance(m, OwnScores)]
    with torch.no_grad():
        before = output(ours, given)
        for m in ours.modules():
            if isinstance(m, tisa.TISA):
                m.kernel_amplitudes.normal_(generator=torch.Generator().manual_seed(3))
    found = {}
    for implementation in allowed:
        ours.set_attn_implementation(implementation)
        found[implementation] = measured(ours, given)
    first = next(iter(found.values()))
    if not (first["output"] - before).abs().max() > 1e-5 * before.abs().max():
        raise WrongError("scores change nothing")
    for owner in owners:
        if any(p.grad is None or not p.grad.any() for p in owner.offset_scores.parameters()):
            raise WrongError(f"scores of {type(owner).__name__} are not used")
    for other in found.values():
        assert_near(other["output"], first["output"], "with scores, another implementation")


def check_keep(model):
    """Assert that a conversion that keeps positions changes nothing."""
    given = tokens_for(model, padded=True)
    ours = tisa.hf.convert(model, positions="keep", init="zero")
    exact, plain = references(model, given)
    default, allowed, refused = ours.config._attn_implementation, [], {}
    for implementation in ("eager", "sdpa", "tisa"):
        try:
            ours.set_attn_implementation(implementation)
            found = measured(ours, given)
        except ValueError as error:
            theirs = "does not support an attention implementation through" in str(error)
            mine = re.search(r'hands "(\w+)".*take attn_implementation="eager"$', str(error))
            if not theirs and not mine and not str(error).endswith(f'got "{implementation}"'):
                raise WrongError(f"{implementation}: {error}") from error
            refused[implementation] = mine[1] if mine else "it"
            continue
        assert_exact(found, exact, plain)
        allowed.append(implementation)
    if default not in allowed:
        default = allowed[0]
    ours.set_attn_implementation(default)
    assert_same_generation(model, ours, given)
    assert_saved(ours, given)
    assert_used(ours, given, allowed)
    if "tisa" in allowed:
        return "exact"
    return f'exact with "{default}"; "tisa" refuses {refused["tisa"]}'


def check_replace(model):
    """Assert that a conversion that replaces positions loses what the table says, and no more."""
    given = tokens_for(model, padded=True)
    lists = [row[row != 1].tolist() for row in tokens_for(model, batch=6)["input_ids"]]
    ours = tisa.hf.convert(model, positions="replace", num_kernels=2, calibration=lists)
    long = tokens_for(model, length=200)
    with torch.no_grad():
        for each in (given, long):
            if not torch.isfinite(output(ours, each)).all():
                raise WrongError("not finite")
    if ours.can_generate() and sees_no_later(ours, given):
        with_cache = generated(ours, given)
        assert_near(generated(ours, given, use_cache=False), with_cache, "with a cache")
    assert_no_place(ours, given)
    assert_saved(ours, given)
    even = copy.deepcopy(model)
    table = families.position_table(even).embedding
    with torch.no_grad():
        table.weight.copy_(table.weight[-1:].expand_as(table.weight))
        for m in even.modules():
            if hasattr(m, "relative_attention_bias"):
                m.relative_attention_bias.weight.zero_()
    ours = tisa.hf.convert(even, positions="replace", init="zero", calibration=lists)
    exact, plain = references(even, given)
    assert_exact(measured(ours, given), exact, plain, ["output"])
    return "exact"


def check_stock(model):
    """Assert that the operator in a stock model changes nothing."""
    given, calls = tokens_for(model, padded=True), []

    def counted(*args, **kwargs):
        calls.append(1)
        return implementations.on_operator(*args, **kwargs)

    exact, plain = references(model, given)
    config = copy.deepcopy(model.config)
    AttentionInterface.register("tisa", counted)
    try:
        stock = type(model)._from_config(config, attn_implementation="tisa", dtype=torch.float32)
    except (KeyError, ValueError) as refused:
        return f"refused by transformers: {told(refused)}"
    try:
        # A part may have been built without its pooling layer.
        stock.load_state_dict(model.state_dict(), strict=False)
        stock.eval()
        assert_exact(measured(stock, given), exact, plain)
        assert_same_generation(model, stock, given)
    finally:
        AttentionInterface.register("tisa", implementations.on_operator)
    return "exact" if calls else "not reached: its attention has code of its own"


CHECKS = {"keep": check_keep, "replace": check_replace, "stock": check_stock}


def cell(check, model):
    """Return what became of a check, in words."""
    try:
        return check(model)
    except ValueError as refused:
        sentence = " ".join(str(refused).split())
        ours = "cannot be converted: " in sentence or sentence.startswith(("convert:", "attn_"))
        return (
            f"refused: {sentence.split('cannot be converted: ')[-1]}"
            if ours
            else f"wrong: {told(refused)}"
        )
    except Exception as failed:
        return f"wrong: {told(failed)}"


def told(error):
    """Return an error as a cell."""
    said = re.sub(r" from '/[^']*'", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {said[:200]}"


def checked(model):
    """Return the cells of a model, and of the parts that a refusal names."""
    row = {"class": type(model).__name__}
    with torch.no_grad():
        try:
            output(model, tokens_for(model, padded=True))
        except Exception as failed:
            row["runs"] = told(failed)
    for name, check in CHECKS.items():
        reason = None if name == "stock" else families.reason_against(model, name)
        if reason is not None or "runs" not in row:
            row[name] = f"refused: {reason}" if reason else cell(check, model)
    named = {
        part for cell in row.values() for part in re.findall(r"convert\(model\.([\w.]+)", cell)
    }
    for part in sorted(named):
        alone = checked(model.get_submodule(part))
        row.setdefault("parts", {})[part] = alone
    return row


def rows_of(model_type):
    """Yield the cells of each class of a type."""
    config_class = CONFIG_MAPPING[model_type]
    for cls in model_classes(config_class):
        if not takes_tokens(cls):
            yield {"class": cls.__name__, "input": str(cls.main_input_name)}
            continue
        try:
            model = build(cls, config_class)
        except Exception as failed:
            yield {"class": cls.__name__, "not built": told(failed)}
        else:
            yield checked(model)


def child(model_type, pipe):
    """Send the rows of a type, or why there are none."""
    try:
        found = list(rows_of(model_type))
    except Exception as failed:
        found = [{"not built": told(failed)}]
    pipe.send(found)


def rows(types):
    """Yield each type and its rows; each is made in a process of its own."""
    for model_type in types:
        receive, send = multiprocessing.Pipe()
        work = multiprocessing.get_context("fork").Process(target=child, args=(model_type, send))
        work.start()
        send.close()
        row = [{"not built": f"not done in {SECONDS} s"}]
        try:
            if receive.poll(SECONDS):
                row = receive.recv()
        except EOFError:
            row = [{"not built": "the process died"}]
        work.kill()
        work.join()
        yield model_type, row


def main():
    """Write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--types", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    number, count = map(int, options.shard.split("/"))
    chosen = options.types.split(",") if options.types else sorted(CONFIG_MAPPING_NAMES)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    found, begun = {}, time.time()
    for model_type, row in rows(chosen[number::count]):
        found[model_type] = row
        sys.stdout.write(f"{time.time() - begun:6.0f} s  {model_type}: {json.dumps(row)}\n")
        sys.stdout.flush()
    if options.out:
        head = {"transformers": transformers.__version__, "torch": torch.__version__}
        options.out.write_text(json.dumps(head | {"types": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
