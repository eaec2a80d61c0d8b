"""A score curve in, S kernels out: the numbers of a `TISA` whose f(k) is nearest to given curves.

Real heads have one-offset spikes, bumps with side lobes, one-sided slopes and dips at 0, so no
fixed grid of kernels will do. For each head: take the kernel of a dictionary that explains most of
what is left (matching pursuit), refine all kernels together (Levenberg–Marquardt on a, log b and
c), see for each kernel whether another would serve better in its place, and go on to the next.
Everything is weighted by offset, in float64, deterministic, and all heads go side by side; what
comes out for a head does not depend on the others beyond rounding.
"""

from typing import NamedTuple

import torch

from tisa.shapes import Float, Int, Tensor

# Broader than any sequence yet, and sharper than one offset: bounds of b.
BROADEST, SHARPEST = 1e-5, 20.0
# Bound of |a| in multiples of the curve: two opposite kernels of huge amplitude are not readable,
# and their difference is lost in float32.
LARGEST = 10.0


class Kernels(NamedTuple):
    """S kernels per head, each tensor (heads, kernels): the a, b and c of a `TISA`."""

    amplitude: Float[Tensor, "heads kernels"]
    sharpness: Float[Tensor, "heads kernels"]
    offset: Float[Tensor, "heads kernels"]

    def curve(self, offsets: Int[Tensor, " span"]) -> Float[Tensor, "heads span"]:
        """Return Σ a·exp(−|b|·(k − c)²) of each offset, in the kernels' dtype."""
        u = offsets.to(self.offset.dtype) - self.offset.unsqueeze(-1)
        shape = torch.exp(-self.sharpness.abs().unsqueeze(-1) * u**2)
        return (self.amplitude.unsqueeze(-1) * shape).sum(1)


def fit_kernels(
    curves: Float[Tensor, "heads span"],
    offsets: Int[Tensor, " span"],
    num_kernels: int,
    *,
    weights: Float[Tensor, "heads span"] | Float[Tensor, " span"] | None = None,
    up_to_constant: bool = False,
) -> Kernels:
    """Return `num_kernels` kernels per head whose sum is nearest to the head's curve, in float64.

    Args:
        curves: the score of each offset, one row per head; finite where the weight is not 0.
        offsets: the offsets (key − query) that the columns belong to, in any order.
        num_kernels: S; 0 gives the zero function.
        weights: how much each offset counts in the squared error, 0 or more; None: all alike.
        up_to_constant: let each head's curve be off by a constant, which a softmax does not see.
    """
    return fit_path(curves, offsets, num_kernels, weights=weights, up_to_constant=up_to_constant)[
        -1
    ]


def fit_path(
    curves: Float[Tensor, "heads span"],
    offsets: Int[Tensor, " span"],
    num_kernels: int,
    *,
    weights: Float[Tensor, "heads span"] | Float[Tensor, " span"] | None = None,
    up_to_constant: bool = False,
) -> tuple[Kernels, ...]:
    """Return the fits with 0, 1, … `num_kernels` kernels; each explains no less than the last.

    The arguments are those of `fit_kernels`, and its result is the last of these.
    """
    if num_kernels < 0:
        raise ValueError(f"fit_kernels: num_kernels must be 0 or more, got {num_kernels}")
    y, w = _checked(curves, offsets, weights)
    k = offsets.to(torch.float64)
    empty = y.new_zeros(len(y), 0)
    path = [Kernels(empty, empty, empty)]
    if num_kernels == 0:
        return tuple(path)
    problem = _Problem(y, w, k, up_to_constant)
    for _ in range(num_kernels):
        added = problem.refined(problem.with_another(path[-1]), steps=40)
        for replaced in range(added.amplitude.shape[1] if path[-1].amplitude.shape[1] else 0):
            kept = [i for i in range(added.amplitude.shape[1]) if i != replaced]
            fewer = Kernels(*(part[:, kept] for part in added))
            other = problem.refined(problem.with_another(fewer), steps=15)
            added = problem.better(added, other)
        path.append(problem.refined(added, steps=60))
    return tuple(path)


def explained(
    curves: Float[Tensor, "heads span"],
    offsets: Int[Tensor, " span"],
    kernels: Kernels,
    *,
    weights: Float[Tensor, "heads span"] | Float[Tensor, " span"] | None = None,
    up_to_constant: bool = False,
) -> Float[Tensor, " heads"]:
    """Return each head's R²: the share of the curve's weighted variance that the kernels explain.

    R² = 1 − Σ w·(y − f)² / Σ w·(y − ȳ)²; 1 for a flat curve that is met exactly. It is negative
    where the kernels are worse than the curve's mean, as no kernels at all mostly are.
    """
    y, w = _checked(curves, offsets, weights)
    left = y - Kernels(*(part.to(torch.float64) for part in kernels)).curve(offsets)
    if up_to_constant:
        left = left - (w * left).sum(-1, keepdim=True)
    around_mean = y - (w * y).sum(-1, keepdim=True)
    missed, total, size = ((w * part**2).sum(-1) for part in (left, around_mean, y))
    limits = torch.finfo(torch.float64)
    # Subtracting its mean from a flat curve leaves rounding, of which nothing can be explained.
    rounding = (16 * limits.eps) ** 2 * size
    exact = missed <= rounding.clamp_min(limits.tiny)
    return torch.where(exact, 1.0, 1 - missed / total.clamp_min(limits.tiny))


class _Problem:
    """Weighted least squares of curves y at offsets k, all heads at once."""

    def __init__(self, y: Tensor, w: Tensor, k: Tensor, up_to_constant: bool) -> None:
        self.w, self.k, self.up_to_constant = w, k, up_to_constant
        self.y = self._centred(y)
        self.limit = LARGEST * self.y.abs().amax(-1, keepdim=True).clamp_min(1e-12)
        self.sharpness, self.offset = _dictionary(k)
        atoms = torch.exp(-self.sharpness[:, None] * (k - self.offset[:, None]) ** 2)
        self.atoms = atoms
        self.norms = w @ (atoms**2).T
        if up_to_constant:
            self.norms = self.norms - (w @ atoms.T) ** 2
        self.norms = self.norms.clamp_min(1e-9)

    def _centred(self, part: Tensor) -> Tensor:
        """Return columns less their weighted mean, where a constant does not count."""
        if not self.up_to_constant:
            return part
        w = self.w if part.ndim == 2 else self.w.unsqueeze(1)
        return part - (w * part).sum(-1, keepdim=True)

    def shapes(self, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """Return k − c, and the kernels with amplitude 1."""
        u = self.k - kernels.offset.unsqueeze(-1)
        return u, torch.exp(-kernels.sharpness.unsqueeze(-1) * u**2)

    def residual(self, amplitude: Tensor, shapes: Tensor) -> Tensor:
        """Return what the kernels leave of the curves."""
        return self.y - self._centred((amplitude.unsqueeze(1) @ shapes).squeeze(1))

    def loss(self, kernels: Kernels) -> Tensor:
        """Return each head's weighted squared error."""
        _, shapes = self.shapes(kernels)
        return (self.w * self.residual(kernels.amplitude, shapes) ** 2).sum(-1)

    def with_another(self, kernels: Kernels) -> Kernels:
        """Return the kernels and the dictionary's best for what they leave, amplitudes refitted."""
        left = self.residual(kernels.amplitude, self.shapes(kernels)[1])
        gain = (self.w * left) @ self.atoms.T
        best = (gain**2 / self.norms).argmax(-1, keepdim=True)
        more = Kernels(
            torch.cat((kernels.amplitude, gain.gather(-1, best) / self.norms.gather(-1, best)), 1),
            torch.cat((kernels.sharpness, self.sharpness[best]), 1),
            torch.cat((kernels.offset, self.offset[best]), 1),
        )
        shapes = self._centred(self.shapes(more)[1])
        weighted = shapes * self.w.unsqueeze(1)
        gram = weighted @ shapes.mT
        ridge = 1e-9 * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        aim = weighted @ self.y.unsqueeze(-1)
        amplitude = torch.linalg.solve(gram + ridge, aim).squeeze(-1)
        return self.better(more, more._replace(amplitude=amplitude.clamp(-self.limit, self.limit)))

    def better(self, first: Kernels, second: Kernels) -> Kernels:
        """Return for each head the kernels with the smaller error."""
        take = (self.loss(second) < self.loss(first)).unsqueeze(-1)
        return Kernels(*(torch.where(take, b, a) for a, b in zip(first, second, strict=True)))

    def refined(self, kernels: Kernels, steps: int) -> Kernels:
        """Return the kernels after Levenberg–Marquardt steps on a, log b and c, within bounds."""
        damping = torch.full_like(self.limit, 1e-2)
        u, shapes = self.shapes(kernels)
        left = self.residual(kernels.amplitude, shapes)
        loss = (self.w * left**2).sum(-1, keepdim=True)
        for _ in range(steps):
            a, b = kernels.amplitude.unsqueeze(-1), kernels.sharpness.unsqueeze(-1)
            by_c = 2 * a * b * u * shapes
            by_log_b = -by_c * u / 2
            jacobian = self._centred(torch.cat((shapes, by_log_b, by_c), 1))
            weighted = jacobian * self.w.unsqueeze(1)
            normal = weighted @ jacobian.mT
            diagonal = normal.diagonal(dim1=-2, dim2=-1)
            floor = 1e-12 * diagonal.amax(-1, keepdim=True) + 1e-30
            damped = normal + torch.diag_embed(damping * diagonal + floor)
            step = torch.linalg.solve(damped, weighted @ left.unsqueeze(-1))
            d_a, d_log_b, d_c = step.squeeze(-1).chunk(3, -1)
            tried = Kernels(
                (kernels.amplitude + d_a).clamp(-self.limit, self.limit),
                (kernels.sharpness * d_log_b.clamp(-2, 2).exp()).clamp(BROADEST, SHARPEST),
                (kernels.offset + d_c).clamp(self.k.min(), self.k.max()),
            )
            tried_u, tried_shapes = self.shapes(tried)
            tried_left = self.residual(tried.amplitude, tried_shapes)
            tried_loss = (self.w * tried_left**2).sum(-1, keepdim=True)
            good = tried_loss < loss
            kernels = Kernels(
                *(torch.where(good, b, a) for a, b in zip(kernels, tried, strict=True))
            )
            u, shapes = (
                torch.where(good.unsqueeze(-1), b, a)
                for a, b in ((u, tried_u), (shapes, tried_shapes))
            )
            left, loss = (
                torch.where(good, b, a) for a, b in ((left, tried_left), (loss, tried_loss))
            )
            damping = torch.where(good, damping / 4, damping * 5).clamp(1e-12, 1e6)
        return kernels


def _dictionary(k: Tensor) -> tuple[Tensor, Tensor]:
    """Return sharpness and offset of every kernel to choose from: fine near 0, coarse far away."""
    reach = int(k.abs().max().clamp(max=2**20))
    near = torch.arange(-12, 12.5, 0.5, dtype=k.dtype, device=k.device)
    step = max(4, reach // 32)
    far = torch.arange(12 + step, max(13, reach) + step, step, dtype=k.dtype, device=k.device)
    places = torch.cat((-far, near, far))
    # Every end of the offsets is there too: a slope is the flank of a kernel that stands there.
    inside = places[(places >= k.min()) & (places <= k.max())]
    places = torch.cat((inside, k.min()[None], k.max()[None])).unique()
    broadest = min(3e-4, 1 / max(1, reach) ** 2)
    sharp = torch.logspace(0, 1, 18, dtype=k.dtype, device=k.device, base=3 / broadest) * broadest
    b, c = torch.meshgrid(sharp.clamp_min(BROADEST), places, indexing="ij")
    return b.reshape(-1), c.reshape(-1)


def _checked(curves: Tensor, offsets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return curves and weights in float64, weights (heads, span) with sum 1; 0 · y where w = 0."""
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise TypeError(
            f"fit_kernels: offsets must be an integer tensor (key − query), got {offsets.dtype}"
        )
    if curves.ndim != 2 or offsets.ndim != 1 or curves.shape[1] != len(offsets):
        raise ValueError(
            "fit_kernels: curves must be (heads, span) and offsets (span), "
            f"got {tuple(curves.shape)} and {tuple(offsets.shape)}"
        )
    if len(offsets) == 0:
        raise ValueError("fit_kernels: offsets must not be empty")
    y = curves.detach().to(torch.float64)
    w = torch.ones_like(y) if weights is None else weights.detach().to(torch.float64)
    try:
        w = w.expand_as(y)
    except RuntimeError:
        raise ValueError(
            "fit_kernels: weights must be (span) or (heads, span) as the curves, "
            f"got {tuple(w.shape)} for curves {tuple(y.shape)}"
        ) from None
    total = w.sum(-1, keepdim=True)
    if not bool(torch.isfinite(w).all() & (w >= 0).all() & (total > 0).all()):
        raise ValueError(
            "fit_kernels: weights must be finite and 0 or more, with some weight for each head"
        )
    if not bool(torch.isfinite(y[w > 0]).all()):
        raise ValueError(
            "fit_kernels: curves must be finite where the weight is not 0; "
            "give offsets that were never seen the weight 0"
        )
    return torch.where(w > 0, y, 0.0), w / total
