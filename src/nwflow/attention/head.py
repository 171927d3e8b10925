r"""The exact head: one attention head without parameters that is the Nadaraya-Watson field of each row's own support.

Time runs from t = 0 (noise) to t = 1 (data). For a batch of queries x (B, n, d) and supports s (B, m, d)

    w_i = softmax_i(log pi_i - |x - alpha s_i|^2 / (2 sigma^2)),      D = sum_i w_i s_i = E[X_1 | X_t = x],

which is :class:`~nwflow.NWField` on ``Support.batch(s)`` (Smola 2026, arXiv 2605.13386), made for supports that are new
at every call. In coordinates z = s - c, centred at each support's mean, a logit is y . z_i - b |z_i|^2 / 2 + log pi_i
with y = alpha (x - alpha c) / sigma^2 and b = alpha^2 / sigma^2; the formulas over the moments of w are those of the
field (:mod:`nwflow._moments`), and so is the bound on the rounding of a logit (:mod:`nwflow.kernel.rescore`) that says
whether float32 products suffice or float64 ones are needed. A batch that needs more than that (two tight clusters at
the smallest bandwidths, sigma = 0, more pairs than memory should hold) goes to the field itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from nwflow._convert import as_weights
from nwflow._frame import Frame
from nwflow._moments import FORMULAS, MOMENTS, VECTORS, Posterior, State, wanted
from nwflow._pointset import prior
from nwflow.field import NWField
from nwflow.kernel.autograd import eager
from nwflow.kernel.posterior import Moments, full_precision
from nwflow.paths import CondOT, Path, Schedule, broadcast_schedule, is_vmapped, working_dtype
from nwflow.support import Support

__all__ = ["NWHead"]

PAIRS = 2**25  # weights that are held at once (256 MiB in float64); beyond, the field streams them


class NWHead(nn.Module):
    """The Nadaraya-Watson field of supports that come with the queries: attention with no parameter to learn.

    Meant as the frozen, exact first layer of a network v(x, t, S). The path is fixed at construction and the call takes
    ``t``, as everywhere in nwflow: a network has one path, the velocity needs its derivatives, and times are checked
    and broadcast in one place. The call returns one tensor of the shape of ``x``, the denoiser D, which stays finite
    at both ends of time (the velocity does not) and can be joined to ``x`` as it is; statistics for gates and features
    come from :meth:`posterior` in the same pass. Nothing about the support is kept between calls.

    Args:
        path: a Gaussian path; ``CondOT()`` when None.
        accuracy: as for :class:`~nwflow.NWField`; None is the float32 pass on centred data alone.

    Shapes: ``x`` ``(B, n, *event)``, ``points`` ``(B, m, *event)``, ``mask`` ``(B, m)`` booleans with True = real
    point, ``weights`` ``(B, m)`` prior weights of any scale, ``t`` a float, 0-d, ``(B, 1)`` or ``(B, n)``.

    Differentiable in ``x``, ``t``, ``points`` and ``weights`` to every order, by plain operations that hold the B n m
    weights. What masked slots hold, NaN included, has no influence. One flag of the whole batch replaces checks of
    every point (one synchronisation on a GPU); only where it is raised are the rows at fault looked for.

    Raises:
        ValueError, TypeError: shapes, dtypes and times that do not fit (``x`` and ``points`` of different width); NaN
            or infinite points; a row whose points are all masked, named by its batch index.

    Example:
        >>> head = NWHead()
        >>> x, points = torch.tensor([[[0.5]]]), torch.tensor([[[-1.0], [1.0], [9.0]]])
        >>> head(x, points, 0.5, mask=torch.tensor([[True, True, False]]))
        tensor([[[0.7616]]])
        >>> head.posterior(x, points[:, :2], 0.5, ("velocity", "n_eff")).n_eff
        tensor([[1.2658]])
    """

    def __init__(self, path: Path | None = None, accuracy: float | None = 1e-5) -> None:
        super().__init__()
        self.path = CondOT() if path is None else path
        if not isinstance(self.path, Path):
            raise TypeError(f"path: expected a nwflow Path such as CondOT(), got {type(path).__name__}")
        if accuracy is not None and not 0.0 < accuracy < 1.0:
            raise ValueError(f"accuracy: expected None or a tolerance in (0, 1), got {accuracy!r}")
        self.accuracy = accuracy
        self._reaches_zero = self.path(1.0).sigma.item() == 0.0

    def extra_repr(self) -> str:
        return f"{self.path!r}, accuracy={self.accuracy}"

    def forward(
        self,
        x: Float[Tensor, "B n *event"],
        points: Float[Tensor, "B m *event"],
        t: float | Tensor,
        mask: Bool[Tensor, "B m"] | None = None,
        weights: Float[Tensor, "B m"] | None = None,
    ) -> Float[Tensor, "B n *event"]:
        """The denoiser D(x, t; points), shape and dtype of ``x``; at sigma = 0 the nearest point."""
        found = self.posterior(x, points, t, ("denoiser",), mask, weights).denoiser
        assert found is not None
        return found

    def posterior(
        self,
        x: Float[Tensor, "B n *event"],
        points: Float[Tensor, "B m *event"],
        t: float | Tensor,
        moments: Iterable[str] = ("denoiser",),
        mask: Bool[Tensor, "B m"] | None = None,
        weights: Float[Tensor, "B m"] | None = None,
    ) -> Posterior:
        """Several moments in one pass: names out of ``nwflow.field.MOMENTS``, results as :class:`Posterior`.

        ``denoiser``, ``velocity``, ``score`` and ``noise`` have the shape of ``x``; ``n_eff``, ``entropy`` (nats) and
        ``log_density`` (the log-normaliser of the weights and of the Gaussian, nats) are ``(B, n)``.
        """
        names = (moments,) if isinstance(moments, str) else tuple(moments)
        if not names or any(n not in MOMENTS for n in names):
            raise ValueError(f"moments: expected names out of {MOMENTS}, got {names}")
        _check_shapes(x, points, mask)
        return self._posterior(x, points, t, names, mask, weights)

    @eager
    def _posterior(
        self,
        x: Tensor,
        points: Tensor,
        t: float | Tensor,
        names: tuple[str, ...],
        mask: Tensor | None,
        weights: Tensor | None,
    ) -> Posterior:
        at = self._schedule(t, x)
        with full_precision():
            s = _solve(x, points, mask, weights, at, self.accuracy, names)
        if s is None:  # something is wrong, which the field says, or needs more than one product
            return self.field(points, mask, weights).posterior(x, t, names)
        shape, out = tuple(x.shape), {}
        for name in names:
            vector = name in VECTORS
            dtype = x.dtype if vector else torch.promote_types(x.dtype, torch.float32)
            out[name] = _formula(name, s).reshape(shape if vector else shape[:2]).to(dtype)
        return Posterior(**out)

    def field(self, points: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> NWField:
        """The field that this head evaluates for these supports: the same numbers, to be asked many times."""
        return NWField(Support.batch(points, weights=weights, mask=mask), self.path, accuracy=self.accuracy)

    def _schedule(self, t: float | Tensor, x: Tensor) -> Schedule:
        """alpha, sigma and derivatives as ``(B or 1, n or 1, 1)``."""
        at = broadcast_schedule(self.path, t, tuple(x.shape[:2]), 1, tasks=True)
        values = (v.to(x.device) for v in (at.alpha, at.sigma, at.d_alpha, at.d_sigma))
        return Schedule(*(v.view(1, 1, 1) if v.ndim == 0 else v for v in values))


def _solve(
    x: Tensor,
    points: Tensor,
    mask: Tensor | None,
    weights: Tensor | None,
    at: Schedule,
    accuracy: float | None,
    names: tuple[str, ...],
) -> State | None:
    """The moments of the weights in centred coordinates; None where the field has to be asked instead."""
    (tasks, n), m, wide = x.shape[:2], points.shape[1], working_dtype(x.device)
    if tasks * n * m > PAIRS:
        return None
    flat = points.reshape(tasks, m, -1).to(wide)
    flat = flat if mask is None else torch.where(mask[..., None], flat, 0.0)
    log_prior = _log_prior(flat, points, mask, weights)
    with torch.no_grad():
        centre = log_prior.exp()[:, None] @ flat  # NaN where no point is real
    z, query = flat - centre, x.reshape(tasks, n, flat.shape[-1]).to(wide) - at.alpha * centre
    if mask is not None:
        z = torch.where(mask[..., None], z, 0.0)
    variance = at.sigma.square()
    y, b = at.alpha * query / variance, at.alpha.square() / variance
    dtype = _dtype(x, y, b, z, log_prior, accuracy)
    if dtype is None:
        return None
    one = centre.new_ones(1)
    frame = Frame(centre, 1.0, 0.0 * one, centre.new_zeros(()), diagonal=one)
    found = _moments(y, b, z, log_prior, dtype, set(names))
    return State(at, frame, (tasks, n), query, variance, y, b, found, False, None, None)


def _log_prior(flat: Tensor, points: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
    """Normalised log prior ``(B, m)``, -inf where absent and NaN in a row without a point."""
    shape = flat.shape[:2]
    if weights is not None:
        real = torch.ones(shape, dtype=torch.bool, device=flat.device) if mask is None else mask
        return prior(as_weights(weights, shape, points), real)[2].to(flat.dtype)
    if mask is None:
        return flat.new_full(shape, -math.log(shape[1]))
    count = mask.sum(-1, keepdim=True).to(flat.dtype)
    return torch.where(count > 0, torch.where(mask, -count.log(), -torch.inf), torch.nan)


@torch.no_grad()
def _dtype(x: Tensor, y: Tensor, b: Tensor, z: Tensor, log_prior: Tensor, accuracy: float | None) -> torch.dtype | None:
    """The dtype whose logits are within ``accuracy``; None if no product is, or if a number is not finite."""
    if is_vmapped(y) or is_vmapped(z) or is_vmapped(log_prior):
        return y.dtype
    square, d = z.square().sum(-1), z.shape[-1]
    radius = square.amax(-1).sqrt()[:, None]
    size = torch.linalg.vector_norm(y, dim=-1) * radius + 0.5 * b.squeeze(-1) * radius.square()
    largest = log_prior.masked_fill(log_prior == -torch.inf, 0.0).abs().amax()
    size = size.amax() if size.numel() else torch.zeros_like(largest)
    reach, spread = torch.stack([size + largest, square.amax()]).tolist()
    if not math.isfinite(reach + spread):
        return None
    error = (2.0 * math.sqrt(d) + 8.0) * reach / 2.0
    cheap = x.dtype != torch.float64 and reach < 1e30 and (spread == 0.0 or 1e-30 < spread < 1e30)  # float32 holds it
    if cheap and (accuracy is None or error * torch.finfo(torch.float32).eps <= accuracy):
        return torch.float32
    return y.dtype if accuracy is None or error * torch.finfo(y.dtype).eps <= accuracy else None


def _moments(y: Tensor, b: Tensor, z: Tensor, log_prior: Tensor, dtype: torch.dtype, names: set[str]) -> Moments:
    """The moments that ``names`` need from one dense pass; logits and weights in ``dtype``, sums in that of ``y``."""
    want, wide, square = wanted(names), y.dtype, z.square().sum(-1, keepdim=True)
    b, f, prior_row = (b, square.mT, log_prior[:, None]) if b.shape[1] == 1 else (
        b.to(dtype), square.mT.to(dtype), log_prior[:, None].to(dtype)
    )  # fmt: skip
    values = z.to(dtype)
    logits = torch.baddbmm((prior_row - 0.5 * b * f).to(dtype).expand(-1, y.shape[1], -1), y.to(dtype), values.mT)
    w = torch.softmax(logits, -1)
    lse = torch.logsumexp(logits, -1) if names & {"log_density", "entropy"} else w[..., 0]
    real = log_prior.masked_fill(log_prior == -torch.inf, 0.0)[..., None]
    return Moments(
        lse.to(wide),
        mean=(w @ values).to(wide) if want.mean else None,
        square=w.to(wide) @ square if want.square else None,
        prior=(w.to(wide) @ real).squeeze(-1) if want.prior else None,
        n_eff=w.square().sum(-1).reciprocal().to(wide) if want.mass2 else None,
    )


def _formula(name: str, s: State) -> Tensor:
    if name == "n_eff":
        assert s.found.n_eff is not None
        return s.found.n_eff
    if name == "covariance_trace":
        return s.trace(torch.ones_like(s.variance[..., :1, :1]))
    return FORMULAS[name](s)


def _check_shapes(x: Tensor, points: Tensor, mask: Tensor | None) -> None:
    for name, v in (("x", x), ("points", points)):
        if not isinstance(v, Tensor) or not v.is_floating_point():
            got = f"a tensor of {v.dtype}" if isinstance(v, Tensor) else type(v).__name__
            raise TypeError(f"{name}: expected a tensor of floats, got {got}")
    if x.ndim < 2 or points.ndim < 2 or x.shape[0] != points.shape[0] or 0 in points.shape:
        raise ValueError(
            "x, points: expected (B, n, *event) and (B, m, *event) with at least one point, "
            f"got {tuple(x.shape)} and {tuple(points.shape)}"
        )
    if x.shape[2:] != points.shape[2:]:
        raise ValueError(
            f"x, points: expected the same event shape, got {tuple(x.shape[2:])} for x and "
            f"{tuple(points.shape[2:])} for points: queries and support must have the same width"
        )
    if x.device != points.device:
        raise ValueError(f"x, points: expected one device, got {x.device} and {points.device}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != points.shape[:2]):
        raise ValueError(
            f"mask: expected booleans of shape {tuple(points.shape[:2])}, True = real point, "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )
