"""One list of what the operator promises; every backend is run over all of it."""

from dataclasses import dataclass, field
from typing import Any

import torch

import tisa


@dataclass
class Case:
    """Sizes and options of one call; `make` draws its tensors."""

    name: str
    queries: int = 9
    keys: int = 9
    batch: int = 2
    heads: int = 4
    key_heads: int = 4
    dim: int = 8
    value_dim: int = 8
    scores: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    mask: str | None = None
    key_scores: str | None = None
    # What the drawn numbers are rounded to before anybody sees them.
    rounding: torch.dtype = torch.float64

    def make(self, dtype=torch.float64, device="cpu"):
        """Return (query, key, value), the scoring function or None, and the options."""
        generator = torch.Generator().manual_seed(1)

        def draw(*shape):
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return drawn.to(device=device, dtype=dtype).requires_grad_()

        qkv = (
            draw(self.batch, self.heads, self.queries, self.dim),
            draw(self.batch, self.key_heads, self.keys, self.dim),
            draw(self.batch, self.key_heads, self.keys, self.value_dim),
        )
        options = dict(self.options)
        if self.key_heads != self.heads:
            options["enable_gqa"] = True
        if self.mask is not None:
            options["attn_mask"] = self.make_mask(generator).to(device)
        if self.key_scores is not None:
            exact = torch.promote_types(dtype, torch.float32)
            drawn = self.make_key_scores(generator).to(device=device, dtype=exact)
            options["key_scores"] = drawn.requires_grad_()
        return qkv, self.make_scoring().to(device, dtype) if self.scores else None, options

    def make_mask(self, generator):
        b, h, q, k = self.batch, self.heads, self.queries, self.keys
        match self.mask:
            case "dense":
                mask = torch.rand(b, h, q, k, generator=generator) > 0.4
                mask[0, :, 0] = False
                return mask
            case "heads":
                return torch.rand(h, q, k, generator=generator) > 0.4
            case "left padding":
                return (torch.arange(k) >= torch.arange(b)[:, None] * 2)[:, None, None, :]
            case "right padding":
                return (torch.arange(k) < k - torch.arange(b)[:, None] * 2)[:, None, None, :]
            case "queries":
                return (torch.arange(q) % 3 > 0)[:, None]
            case "float":
                return torch.randn(b, 1, q, k, generator=generator).double()
            case "float with -inf":
                mask = torch.randn(q, k, generator=generator).double()
                mask[:, ::3] = -torch.inf
                mask[0] = -torch.inf
                return mask
            case "float with the lowest":
                mask = torch.randn(b, 1, q, k, generator=generator)
                mask[..., ::3] = torch.finfo(torch.float32).min
                mask[0, :, 0] = torch.finfo(torch.bfloat16).min
                return mask
            case "nothing":
                return torch.zeros(1, 1, 1, k, dtype=torch.bool)
        raise AssertionError(self.mask)

    def make_key_scores(self, generator):
        drawn = torch.randn(
            self.batch, self.heads, self.keys, generator=generator, dtype=torch.float64
        )
        match self.key_scores:
            case "drawn":
                return drawn
            case "gates":
                return -torch.nn.functional.logsigmoid(drawn).cumsum(-1)
            case "large":
                return drawn * 1e3
            case "with -inf":
                drawn[..., ::3] = -torch.inf
                drawn[0, 0] = -torch.inf
                return drawn
        raise AssertionError(self.key_scores)

    def make_scoring(self):
        scoring = tisa.TISA(self.heads, 3)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p, width in zip(scoring.parameters(), (2.0, 0.2, 4.0), strict=True):
                p.copy_(torch.randn(p.shape, generator=generator) * width)
        return scoring

    def call(self, backend, qkv, scoring, options):
        """Return the operator's result for these tensors."""
        vector = None
        if scoring is not None:
            start = options.get("query_start")
            vector = scoring(self.queries, self.keys, query_start=start)
        return tisa.attention(*qkv, vector, backend=backend, **options)


def leaves(qkv, scoring, options):
    """Return all to which a gradient comes back."""
    found = [*qkv, *(scoring.parameters() if scoring is not None else ())]
    return [*found, options["key_scores"]] if "key_scores" in options else found


CASES = [
    Case("plain"),
    Case("no scores", scores=False),
    Case("no scores, causal", scores=False, options={"is_causal": True}),
    Case("no scores, causal, decoding", 1, 9, scores=False, options={"is_causal": True}),
    Case("no scores, causal, fewer queries", 3, 9, scores=False, options={"is_causal": True}),
    Case("causal", options={"is_causal": True}),
    Case("fewer queries", 4, 11),
    Case("more queries", 11, 4),
    Case("causal, fewer queries", 4, 11, options={"is_causal": True}),
    Case("causal, more queries: blind rows", 11, 4, options={"is_causal": True}),
    Case("one query, long cache", 1, 300, batch=1, heads=2, key_heads=2,
         options={"is_causal": True}),
    Case("one query, one key", 1, 1),
    Case("one key", 5, 1),
    Case("several blocks", 261, 150, batch=1, heads=2, key_heads=2),
    Case("several blocks, causal", 261, 261, batch=1, heads=2, key_heads=1,
         options={"is_causal": True}),
    Case("static cache", 3, 20, options={"is_causal": True, "query_start": 6}),
    Case("static cache, start on the device", 3, 20,
         options={"is_causal": True, "query_start": torch.tensor(6)}),
    Case("shard before the keys", 5, 7, options={"query_start": -9}),
    Case("shard before the keys, causal: all blind", 5, 7,
         options={"query_start": -9, "is_causal": True}),
    Case("window", 20, 20, options={"window": 4}),
    Case("window, causal", 20, 20, options={"window": (4, None), "is_causal": True}),
    Case("window to the right", 20, 20, options={"window": (0, 3)}),
    Case("window away from the keys: blind rows", 6, 6, options={"window": 2, "query_start": 4}),
    Case("window over several blocks", 300, 300, batch=1, heads=2, key_heads=2,
         options={"window": 40}),
    Case("grouped heads", key_heads=2),
    Case("one key head", key_heads=1, options={"is_causal": True}),
    Case("scale", options={"scale": 0.7}),
    Case("wider values", value_dim=5),
    Case("batch of one", batch=1, heads=1, key_heads=1),
    *[Case(f"{mask} mask", 9, 11, mask=mask) for mask in (
        "dense", "heads", "left padding", "right padding", "queries", "float", "float with -inf",
        "float with the lowest", "nothing",
    )],
    Case("grouped heads, dense mask, causal", 7, 9, key_heads=2, mask="dense",
         options={"is_causal": True}),
    Case("mask over several blocks", 200, 150, batch=2, heads=1, key_heads=1, mask="dense"),
]  # fmt: skip


# With a score for each key.
KEYED = [
    Case("key scores", key_scores="drawn"),
    Case("key scores alone", 4, 7, scores=False, key_scores="drawn"),
    Case("gates, no scores, causal", scores=False, key_scores="gates", options={"is_causal": True}),
    Case("gates, grouped heads, window, fewer queries", 5, 11, key_heads=2, key_scores="gates",
         options={"window": (6, 2)}),
    Case("large key scores, one key head, causal, more queries: blind rows", 11, 4, key_heads=1,
         key_scores="large", options={"is_causal": True}),
    Case("key scores of -inf, causal: blind rows", key_scores="with -inf",
         options={"is_causal": True}),
    Case("key scores of -inf, dense mask", 7, 9, key_scores="with -inf", mask="dense"),
    Case("key scores, float mask", 9, 11, key_heads=2, key_scores="drawn",
         mask="float with the lowest"),
    Case("key scores, one query, one key", 1, 1, key_scores="drawn"),
    Case("gates, one query, long cache", 1, 300, batch=1, heads=2, key_heads=1, key_scores="gates",
         options={"is_causal": True}),
    Case("gates, static cache, start on the device", 3, 20, key_scores="gates",
         options={"is_causal": True, "query_start": torch.tensor(6)}),
    Case("key scores over several blocks", 261, 150, batch=1, heads=2, key_heads=1,
         key_scores="drawn"),
    Case("gates over several blocks, causal", 261, 261, heads=1, key_heads=1, key_scores="gates",
         options={"is_causal": True}),
]  # fmt: skip


def hidden_two_ways(backend, dtype, mask_dtype):
    """Return results with keys hidden by False and by the lowest number of a mask's dtype."""
    qkv, scoring, _ = Case("", 6, 7).make(dtype)
    seen = torch.rand(2, 1, 6, 7, generator=torch.Generator().manual_seed(4)) > 0.4
    seen[0, :, :2] = False
    lowest = torch.finfo(mask_dtype).min
    added = torch.zeros(seen.shape, dtype=mask_dtype).masked_fill(~seen, lowest)
    return [
        tisa.attention(*(x.detach() for x in qkv), scoring(6, 7).detach() * 9, attn_mask=mask,
                       backend=backend)
        for mask in (seen, added)
    ]  # fmt: skip


EMPTY = [
    Case("no batch", batch=0),
    Case("no queries", 0, 5),
    Case("no keys", 5, 0),
    Case("nothing at all", 0, 0),
    Case("no keys, causal, masked", 5, 0, options={"is_causal": True}, mask="right padding"),
    Case("no keys that have scores", 5, 0, key_scores="drawn"),
    Case("no queries, keys that have scores", 0, 5, key_scores="drawn"),
]
