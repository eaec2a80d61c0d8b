"""Read what a model learned about position: each head's curve, its peak, its kernels.

Give a folder saved by tisa.hf or `tisa convert`. Without one, curves of three known shapes are
turned into kernels, and read again.
"""

import argparse

import torch

import tisa
from tisa.fitting import explained, fit_kernels


def made_up(offsets: torch.Tensor) -> tisa.TISA:
    """Return kernels fitted to three curves: previous token, neighbours, all that came before."""
    k = offsets.double()
    previous, near, before = 4.0 * (k == -1), 3 * torch.exp(-k.abs() / 3), 2 * torch.sigmoid(-k)
    curves = torch.stack((previous, near, before))
    kernels = fit_kernels(curves, offsets, 5)
    shares = explained(curves, offsets, kernels)
    print(f"share of each curve that 5 kernels explain: {[round(x, 3) for x in shares.tolist()]}")
    scoring = tisa.TISA(3, 5)
    with torch.no_grad():
        scoring.kernel_amplitudes.copy_(kernels.amplitude)
        scoring.kernel_sharpness.copy_(kernels.sharpness)
        scoring.kernel_offsets.copy_(kernels.offset)
    return scoring


def main() -> None:
    """Print every head's curve as a line of blocks, with its peak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a converted model")
    parser.add_argument("--reach", type=int, default=16, help="offsets to either side")
    given = parser.parse_args()
    offsets = torch.arange(-given.reach, given.reach + 1)
    if given.model is None:
        functions = {"made up": made_up(offsets)}
    else:
        from transformers import AutoModel

        import tisa.hf

        model = AutoModel.from_pretrained(given.model)
        functions = {n: m for n, m in model.named_modules() if isinstance(m, tisa.TISA)}
    for name, scoring in functions.items():
        print(f"{name}, offsets {offsets[0]} to {offsets[-1]}")
        for head, curve in enumerate(scoring.scores(offsets).detach()):
            height = (curve - curve.min()) / (curve.max() - curve.min()).clamp_min(1e-9)
            drawn = "".join(" ▁▂▃▄▅▆▇█"[int(8 * h)] for h in height)
            peak = offsets[curve.argmax()].item()
            print(f"  head {head + 1:2} {drawn}  most at k = {peak:+d}: {curve.max():.2f}")


if __name__ == "__main__":
    main()
