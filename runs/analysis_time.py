"""Time and memory of `tisa analyze` on random models of two published shapes; one record out.

BERT base (12 layers, 512 × 768) and Longformer (12 layers, 4,096 × 768), all figures and the page.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tisa_lab.record import commit

SHAPES = {"bert-base": ("bert", 512), "longformer-4096": ("longformer", 4098)}


def write_model(folder: Path, family: str, rows: int) -> None:
    """Save random weights under the family's names."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    width = 768
    tensors = {
        "embeddings.word_embeddings.weight": torch.randn(30522, width) * 0.02,
        "embeddings.position_embeddings.weight": torch.randn(rows, width) * 0.02,
        "embeddings.token_type_embeddings.weight": torch.randn(2, width) * 0.02,
        "embeddings.LayerNorm.weight": torch.ones(width),
        "embeddings.LayerNorm.bias": torch.zeros(width),
    }
    for layer in range(12):
        for name in ("query", "key"):
            prefix = f"encoder.layer.{layer}.attention.self.{name}"
            tensors[f"{prefix}.weight"] = torch.randn(width, width) * 0.04
            tensors[f"{prefix}.bias"] = torch.zeros(width)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": family, "num_attention_heads": 12, "pad_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))


def measure(model: Path, out: Path) -> dict[str, float]:
    """Return seconds, peak memory and the page's size of one run in a process of its own."""
    program = "from tisa.cli import main; main()"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", program, "analyze", str(model), "--out", str(out)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "wall_s": round(wall, 1),
        "cpu_s": round(cpu, 1),
        # The largest child so far: models are measured from the smallest on.
        "peak_mb": round(after.ru_maxrss / 1024),
        "page_mb": round((out / "index.html").stat().st_size / 1e6, 2),
    }


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/records"))
    arguments = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (family, positions) in SHAPES.items():
            write_model(Path(folder) / name, family, positions)
            rows[name] = measure(Path(folder) / name, Path(folder) / f"{name}-report")
            rows[name]["load_average"] = round(os.getloadavg()[0], 1)
            print(name, rows[name])
    today = datetime.date.today().isoformat()
    record = {
        "date": today,
        "command": "python runs/analysis_time.py",
        "commit": commit(),
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "runs": rows,
    }
    path = arguments.out / f"{today}-analysis-time.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
