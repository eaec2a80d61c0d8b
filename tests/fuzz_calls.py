"""Calls of `tisa.attention` drawn at random over all its arguments: what `fuzz.py` tries.

A call is a pure function of the seed, its number and the options. The structure (which arguments
there are, widths, dtypes) is the same for `ALIKE` calls in a row, so that a GPU's kernels, compiled
for a structure, are used more than once; lengths, numbers, masks and strides are each call's own.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ALIKE = 6
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
HEADS = ((1, 1), (3, 3), (4, 4), (4, 2), (6, 2), (4, 1))


@dataclass
class Drawn:
    """One call: tensors as they are passed, the other arguments, and what is special about it."""

    number: int
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    wanted: list[str]
    upstream: Tensor
    upstream_lse: Tensor
    tags: list[str] = field(default_factory=list)
    # What is wrong with the call, if it is to be refused by everybody.
    invalid: str | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing but a causal mask is added to the logits: PyTorch's own attention."""
        added = {"scores", "key_scores", "mask", "window", "cu_seqlens"} & {
            *self.tensors,
            *self.options,
        }
        return not added


def draw(seed: int, number: int, *, device: str, dtypes: tuple[str, ...], longest: int) -> Drawn:
    """Return the call of that number."""
    return _Draw(seed, number, device, dtypes, longest).call()


class _Draw:
    def __init__(
        self, seed: int, number: int, device: str, dtypes: tuple[str, ...], longest: int
    ) -> None:
        self.number, self.device, self.longest = number, device, longest
        # Two sources of chance: one for the structure, one for all else.
        self.alike = random.Random(f"{seed} {number // ALIKE}")
        self.own = random.Random(f"{seed} {number} own")
        self.generator = torch.Generator().manual_seed(self.own.getrandbits(48))
        self.tags: list[str] = []
        self.dtype = DTYPES[self.alike.choice(dtypes)]
        self.structure()

    def structure(self) -> None:
        """Draw what the calls of a row share."""
        chance = self.alike
        self.width = chance.choices((64, 16, 33, 128, 5, 1, 256), (8, 4, 3, 2, 2, 1, 1))[0]
        self.value_width = self.width if chance.random() < 0.8 else chance.choice((16, 20, 64))
        self.heads, self.key_heads = chance.choice(HEADS)
        self.packed = chance.random() < 0.2
        self.shape = chance.choices(("short", "long", "decoding"), (4, 4, 1.5))[0]
        self.has_scores = chance.random() < 0.85
        self.has_band = self.has_scores and chance.random() < 0.35
        self.causal = chance.random() < 0.4
        self.sides = chance.choice(((True, True), (True, False), (False, True)))
        self.windowed = chance.random() < 0.25
        self.start = chance.choices((None, "int", "tensor"), (6, 2, 2))[0]
        self.mask = chance.choices((None, "bool", "added"), (5, 3, 3))[0]
        self.mask_dtype = chance.choice((self.dtype, torch.float32))
        self.key_mask = chance.random() < 0.5
        self.dropout = chance.choice((0.1, 0.5)) if chance.random() < 0.15 else 0.0
        self.lse = chance.random() < 0.3
        names = ["query", "key", "value", "scores", "mask"]
        wanted = chance.choices(("all", "some", "none"), (8, 1.5, 1.5))[0]
        self.wanted = names[:4] if wanted == "all" else []
        if wanted == "some":
            self.wanted = [name for name in names[:4] if chance.random() < 0.5]
        if wanted != "none" and chance.random() < 0.3:
            self.wanted.append("mask")
        self.has_key_scores = chance.random() < 0.3
        if wanted == "all" or (wanted == "some" and chance.random() < 0.5):
            self.wanted.append("key_scores")

    def call(self) -> Drawn:
        """Draw the rest."""
        batch = self.own.choice((1, 1, 2, 3))
        if self.packed:
            shapes, options, (queries, keys), total = self.packing()
            batch = 1
        else:
            queries, keys = self.lengths()
            lengths = ((self.heads, queries), (self.key_heads, keys), (self.key_heads, keys))
            shapes = [(batch, heads, length) for heads, length in lengths]
            options, total = {}, queries
        widths = (self.width, self.width, self.value_width)
        tensors = self.sequences([(*s, w) for s, w in zip(shapes, widths, strict=True)])
        if self.has_scores:
            tensors["scores"] = self.scores(queries + keys - 1)
        options |= self.rules(queries, keys)
        if self.mask is not None and not self.packed:
            tensors["mask"] = self.masked((batch, self.heads, queries, keys))
        if self.has_key_scores:
            tensors["key_scores"] = self.key_scores(batch, total if self.packed else keys)
        rows = (total, self.heads) if self.packed else (batch, self.heads, total)
        drawn = Drawn(
            number=self.number,
            tensors=tensors,
            options=options,
            wanted=[
                name for name in self.wanted if name in tensors and self.trainable(tensors[name])
            ],
            upstream=self.returned((*rows, self.value_width)),
            upstream_lse=self.normal(*rows).float().to(self.device),
            tags=self.tags,
        )
        self.described(drawn, queries, keys)
        if self.own.random() < 0.03:
            self.spoilt(drawn)
        return drawn

    def lengths(self) -> tuple[int, int]:
        chance = self.own
        if self.shape == "decoding":
            queries, keys = chance.choice((1, 1, 2, 3)), chance.randint(512, 1100)
        else:
            short = (1, 2, chance.randint(3, 16), chance.randint(17, 128), 63, 64, 65, 127, 128)
            long = (129, chance.randint(130, 420), chance.randint(130, 420), 256, 257, 384)
            of = short if self.shape == "short" else long
            queries = keys = chance.choice(of)
            if chance.random() < 0.4:
                keys = chance.choice((*short, *long)) if self.shape == "long" else chance.choice(of)
        return min(queries, self.longest), min(keys, self.longest)

    def packing(self) -> tuple[list[tuple[int, ...]], dict[str, Any], tuple[int, int], int]:
        chance = self.own
        most = min(self.longest, 150 if self.shape == "short" else 400)
        lengths = [
            chance.choice((0, 1, chance.randint(1, most))) for _ in range(chance.randint(1, 5))
        ]
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        # Tokens after the last end belong to nobody; the bound may be larger than needed.
        total = ends[-1] + chance.choice((0, 0, 3))
        longest = max(max(lengths) + chance.choice((0, 0, 7)), 1)
        if total == 0:
            total, ends[-1], longest = 1, 1, max(longest, 1)
        options = {
            "cu_seqlens": torch.tensor(ends, dtype=torch.int32, device=self.device),
            "max_seqlen": longest,
        }
        shapes = [(total, heads) for heads in (self.heads, self.key_heads, self.key_heads)]
        return shapes, options, (longest, longest), total

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def sequences(self, shapes: list[tuple[int, ...]]) -> dict[str, Tensor]:
        """Return query, key and value of these shapes, lying in memory in one of many ways."""
        chance, found = self.own, {}
        way = chance.choice(("plain", "plain", "transposed", "sliced", "every second", "expanded"))
        size = chance.choice((0.3, 1.0, 1.0, 3.0))
        for name, shape in zip(("query", "key", "value"), shapes, strict=True):
            strong = 1.0 if name == "value" else size
            content = (self.normal(*shape) * strong).to(self.dtype).to(self.device)
            found[name] = laid(content, way)
        self.tags.append(f"strides: {way}")
        return found

    def scores(self, span: int) -> Tensor:
        chance = self.own
        height = chance.choices((0.1, 3.0, 30.0, 1e4), (2, 5, 2, 2))[0]
        scores = self.normal(self.heads, span) * height
        if height == 1e4:
            scores = scores.sign() * 1e4 if chance.random() < 0.5 else scores.clamp(-2e4, 2e4)
            self.tags.append("scores of 1e4")
        if chance.random() < 0.15:
            scores[:, :: chance.randint(2, 5)] = -torch.inf
            self.tags.append("scores of −inf")
        wide = torch.promote_types(self.dtype, torch.float32)
        scores = scores.to(wide).to(self.device)
        if chance.random() < 0.15:
            self.tags.append("strided scores")
            scores = laid(scores, "every second")
        return scores

    def key_scores(self, batch: int, keys: int) -> Tensor:
        """Return a score for each key: any numbers, or sums of gates, which grow."""
        chance = self.own
        of_keys = self.normal(batch, self.heads, keys)
        if chance.random() < 0.5:
            of_keys = torch.nn.functional.softplus(of_keys).cumsum(-1)
            self.tags.append("gates")
        else:
            of_keys = of_keys * chance.choice((0.1, 3.0, 30.0, 1e3))
        if chance.random() < 0.2:
            of_keys[:, :, :: chance.randint(1, 5)] = -torch.inf
            self.tags.append("key scores of −inf")
        wide = torch.promote_types(self.dtype, torch.float32)
        of_keys = of_keys.to(wide).to(self.device)
        if self.packed:
            of_keys = of_keys[0].T if chance.random() < 0.5 else of_keys[0].T.contiguous()
        ways = ("plain", "plain", "plain", "sliced", "every second", "expanded")
        way = chance.choice(ways)
        if way == "expanded" and chance.random() < 0.5:
            # The same for all heads.
            self.tags.append("key scores: one for all heads")
            one = of_keys[:, :1]
            return one.expand(of_keys.shape)
        self.tags.append(f"key scores: {way}")
        return laid(of_keys, way)

    def rules(self, queries: int, keys: int) -> dict[str, Any]:
        """Return the arguments that are numbers."""
        chance, options = self.own, {}
        if self.causal:
            options["is_causal"] = True
        if self.windowed:
            left, right = (
                chance.choice((0, 1, chance.randint(0, 90), 1000)) if side else None
                for side in self.sides
            )
            whole = self.sides == (True, True) and chance.random() < 0.3
            options["window"] = left if whole else (left, right)
        if self.start is not None and not self.packed:
            start = chance.choice((keys - queries, chance.randint(-20, keys + 20)))
            as_tensor = self.start == "tensor"
            kind = chance.choice((torch.int32, torch.int64))
            options["query_start"] = (
                torch.tensor(start, dtype=kind, device=self.device) if as_tensor else start
            )
            if as_tensor and self.shape == "decoding":
                options["query_start"] = torch.tensor(
                    chance.randint(0, keys - queries), dtype=kind, device=self.device
                )
        if self.has_band:
            ends = [[self.edge(queries, keys), self.edge(queries, keys)] for _ in range(self.heads)]
            if chance.random() < 0.8:
                ends = [sorted(pair) for pair in ends]
            options["band"] = torch.tensor(ends, dtype=torch.int32, device=self.device)
        if chance.random() < 0.25:
            options["scale"] = chance.choice((0.3, 1.0, -0.3, 0.0))
        if self.heads != self.key_heads:
            options["enable_gqa"] = True
        if self.dropout:
            options["dropout_p"] = self.dropout
        if self.lse:
            options["return_lse"] = True
        return options

    def edge(self, queries: int, keys: int) -> int:
        near, far = self.own.randint(-20, 20), self.own.randint(-queries - 9, keys + 9)
        return self.own.choice((near, near, far, -(2**30), 2**30))

    def masked(self, full: tuple[int, ...]) -> Tensor:
        chance = self.own
        shape = [size if chance.random() < 0.6 else 1 for size in full]
        shape[2] = 1 if self.key_mask else full[2]
        while len(shape) > 2 and shape[0] == 1 and chance.random() < 0.5:
            shape = shape[1:]
        seen = torch.rand(*shape, generator=self.generator) > chance.choice((0.1, 0.5, 0.9))
        way = chance.choice(("anywhere", "anywhere", "padding", "rows"))
        if way == "padding":
            seen = torch.arange(shape[-1]).expand(shape) >= chance.randint(0, shape[-1])
        if way == "rows":
            seen = seen.any(-1, keepdim=True).expand(shape) & (
                torch.rand(*shape[:-1], 1, generator=self.generator) > 0.4
            )
        if self.mask == "bool":
            return seen.to(self.device)
        added = self.normal(*shape).to(self.mask_dtype)
        low = chance.choice((None, -torch.inf, torch.finfo(self.mask_dtype).min, -1e4))
        if low is not None:
            added = torch.where(seen, added, low)
            self.tags.append(f"mask of {'finfo.min' if -torch.inf < low < -1e4 else f'{low:g}'}")
        if chance.random() < 0.2:
            added = laid(added, "transposed")
        return added.to(self.device)

    def returned(self, shape: tuple[int, ...]) -> Tensor:
        """Return the gradient that comes back; of a sum it has no strides."""
        if self.own.random() < 0.15:
            self.tags.append("expanded gradient")
            return torch.ones((), dtype=self.dtype, device=self.device).expand(shape)
        return self.normal(*shape).to(self.dtype).to(self.device)

    @staticmethod
    def trainable(tensor: Tensor) -> bool:
        return tensor.is_floating_point()

    def described(self, drawn: Drawn, queries: int, keys: int) -> None:
        """Say what is special about the call."""
        options, tensors = drawn.options, drawn.tensors
        start = options.get("query_start")
        mask = tensors.get("mask")
        facts = {
            "packed": self.packed,
            "grouped heads": self.heads != self.key_heads,
            "queries ≠ keys": queries != keys,
            "length 1": 1 in (queries, keys),
            "causal": self.causal,
            "window": self.windowed,
            "band": self.has_band,
            "no scores": not self.has_scores,
            "key scores": self.has_key_scores,
            "query_start": isinstance(start, int),
            "static cache": isinstance(start, Tensor),
            "bool mask": mask is not None and mask.dtype == torch.bool,
            "added mask": mask is not None and mask.dtype != torch.bool,
            "gradient of a mask": "mask" in drawn.wanted,
            "dropout": bool(self.dropout),
            "log-sum-exp": self.lse,
            "negative scale": options.get("scale", 1) < 0,
            "scale 0": options.get("scale", 1) == 0,
            "odd width": self.width % 2 == 1,
            "other value width": self.width != self.value_width,
            "no gradients": not drawn.wanted,
            "decoding": self.shape == "decoding" and not self.packed,
        }
        drawn.tags += [fact for fact, holds in facts.items() if holds]

    def spoilt(self, drawn: Drawn) -> None:
        """Make the call one that everybody must refuse."""
        options, tensors = drawn.options, drawn.tensors
        ways = ["is_causal", "return_lse", "enable_gqa", "dropout_p", "window", "key", "scale"]
        named = ("scores", "mask", "band", "key_scores")
        ways += [name for name in named if name in {**tensors, **options}]
        way = drawn.invalid = self.own.choice(ways)
        if way in ("is_causal", "return_lse", "enable_gqa"):
            options[way] = self.own.choice(("no", 1, None))
        elif way == "scale":
            options[way] = float("nan")
        elif way == "dropout_p":
            options[way] = 1.5
        elif way == "window":
            options[way] = (-1, None)
        elif way == "band":
            options[way] = options[way].long()
        elif way in ("scores", "key_scores"):
            tensors[way] = tensors[way][:, :-1]
        elif way == "mask":
            tensors[way] = tensors[way][..., None, None]
        else:
            tensors[way] = tensors[way].to(torch.complex64)


def laid(content: Tensor, way: str) -> Tensor:
    """Return the same numbers lying in memory in that way."""
    if way == "transposed" and content.ndim > 2:
        axes = (1, 2) if content.ndim == 4 else (0, 1)
        return content.transpose(*axes).contiguous().transpose(*axes)
    if way == "sliced":
        room = content.new_full((*content.shape[:-1], content.shape[-1] + 3), 7.0)
        room[..., 3:] = content
        return room[..., 3:]
    if way == "every second":
        room = content.new_full((*content.shape[:-1], 2 * content.shape[-1]), 7.0)
        room[..., ::2] = content
        return room[..., ::2]
    if way == "expanded":
        return content[:1].expand(content.shape)
    return content
