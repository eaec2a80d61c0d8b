"""Long sequences: a training step without an n × n tensor, and the band outside which scores rest.

The chunked backend runs on any device and recomputes blocks in the backward pass. The band says
where each head's curve ends: the fused kernels ("triton", on a GPU) skip the work outside it.
"""

import argparse
import time

import torch

import tisa


def main() -> None:
    """Make one training step, and check a piece of it against the plain formula."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    heads, dim, n = 2, 32, given.length
    scoring = tisa.TISA(heads).to(given.device)
    qkv = [torch.randn(1, heads, n, dim, device=given.device, requires_grad=True) for _ in "qkv"]
    band = scoring.band(torch.float32)
    for head, (low, high) in enumerate(band.tolist()):
        print(f"head {head + 1}: f(k) is constant outside {low} ≤ k ≤ {high}")

    backend = "chunked" if given.device == "cpu" else "auto"
    started = time.perf_counter()
    output = tisa.attention(*qkv, scoring, is_causal=True, backend=backend)
    output.square().mean().backward()
    seconds = time.perf_counter() - started
    square = heads * n * n * 4 / 2**20
    print(f"{n:,} tokens, forward and backward: {seconds:.2f} s ({backend})")
    print(f"a dense bias alone would be {square:,.0f} MiB, the score vector is "
          f"{scoring(n).numel() * 4 / 2**10:,.0f} KiB")  # fmt: skip

    # The last eight queries against all keys, as with a cache; here the dense form is small.
    query, key, value = (x.detach() for x in qkv)
    last = tisa.attention(query[:, :, -8:], key, value, scoring, is_causal=True)
    logits = query[:, :, -8:] @ key.mT / dim**0.5 + scoring.matrix(8, n)
    hidden = torch.ones(8, n, dtype=torch.bool, device=given.device).triu(n - 8 + 1)
    plain = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    for name, found in (("whole sequence", output[:, :, -8:]), ("with a cache", last)):
        print(f"{name}: largest difference to the plain formula {(found - plain).abs().max():.1e}")


if __name__ == "__main__":
    main()
