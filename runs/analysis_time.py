"""Time and memory of `tisa analyze` on random models of published shapes; one record out.

BERT base (12 layers, 512 × 768) and Longformer (12 layers, 4,096 × 768); with `--large` BERT large
(24 layers, 1,024 wide, 50,000 words) with 512 and with 32,768 positions. All weights of a model are
written, all figures and the page are made.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from tisa_lab.record import commit


@dataclass(frozen=True)
class Shape:
    """What of a model decides how long its analysis takes."""

    family: str
    rows: int
    layers: int = 12
    heads: int = 12
    width: int = 768
    words: int = 30522


SHAPES = {"bert-base": Shape("bert", 512), "longformer-4096": Shape("longformer", 4098)}
LARGE = {
    f"bert-large-{rows}": Shape("bert", rows, layers=24, heads=16, width=1024, words=50000)
    for rows in (512, 32768)
}


def write_model(folder: Path, shape: Shape) -> None:
    """Save random weights under the family's names."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    width = shape.width
    tensors = {
        "embeddings.word_embeddings.weight": torch.randn(shape.words, width) * 0.02,
        "embeddings.position_embeddings.weight": torch.randn(shape.rows, width) * 0.02,
        "embeddings.token_type_embeddings.weight": torch.randn(2, width) * 0.02,
    }
    sizes = {
        "attention.self.query": (width, width),
        "attention.self.key": (width, width),
        "attention.self.value": (width, width),
        "attention.output.dense": (width, width),
        "intermediate.dense": (4 * width, width),
        "output.dense": (width, 4 * width),
    }
    layers = [f"encoder.layer.{layer}." for layer in range(shape.layers)]
    for layer in layers:
        for name, size in sizes.items():
            tensors[f"{layer}{name}.weight"] = torch.randn(size) * 0.04
            tensors[f"{layer}{name}.bias"] = torch.zeros(size[0])
    norms = [layer + part for layer in layers for part in ("attention.output.", "output.")]
    for name in ("embeddings.", *norms):
        tensors[f"{name}LayerNorm.weight"] = torch.ones(width)
        tensors[f"{name}LayerNorm.bias"] = torch.zeros(width)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": shape.family,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "vocab_size": shape.words,
        "max_position_embeddings": shape.rows,
        "type_vocab_size": 2,
        "pad_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


def measure(model: Path, out: Path) -> dict[str, float]:
    """Return seconds, peak memory and the page's size of one run in a process of its own."""
    program = "from tisa.cli import main; main()"
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", program, "analyze", str(model), "--out", str(out)],
        stdout=subprocess.DEVNULL,
    )
    # What is resident of a mapped file counts.
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    if status:
        raise RuntimeError(f"tisa analyze {model}: wait status {status}")
    return {
        "wall_s": round(wall, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mb": round(used.ru_maxrss * 1024 / 1e6),
        "model_mb": round((model / "model.safetensors").stat().st_size / 1e6),
        "page_mb": round((out / "index.html").stat().st_size / 1e6, 2),
    }


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="the shapes of BERT large")
    parser.add_argument("--out", type=Path, default=Path("docs/records"))
    arguments = parser.parse_args()
    rows = {}
    for name, shape in (LARGE if arguments.large else SHAPES).items():
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / name
            # Apart, because a process counts as its own the peak of the one that starts it.
            writer = multiprocessing.get_context("spawn").Process(
                target=write_model, args=(model, shape)
            )
            writer.start()
            writer.join()
            before = os.getloadavg()[0]
            rows[name] = asdict(shape) | measure(model, Path(folder) / "report")
        rows[name] |= {"load_before": round(before, 1), "load_after": round(os.getloadavg()[0], 1)}
        print(name, rows[name], flush=True)
    today = datetime.date.today().isoformat()
    packages = ("safetensors", "numpy", "matplotlib")
    record = {
        "date": today,
        "command": "python runs/analysis_time.py" + " --large" * arguments.large,
        "commit": commit(),
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in packages},
        "runs": rows,
    }
    path = arguments.out / f"{today}-analysis-{'large' if arguments.large else 'time'}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
