r"""The ``preconditioned`` preset: the posterior mean in units of the support's own mean and scale.

t = 0 is noise, t = 1 is data; mu and s are the support's mean and standard deviation. With v = alpha^2 s^2 + sigma^2

    D = mu + c_skip (x - alpha mu) + c_out F,    c_skip = alpha s^2 / v,    c_out = sigma s / sqrt(v),
    eps = sigma (x - alpha mu) / v - alpha s F / sqrt(v),

which at F = 0 is the Wiener denoiser, and whose F has a target of unit variance at every t for a Gaussian of that scale
(Karras et al. 2022, arXiv 2206.00364, with the scale of each support). Everything that F sees is in these units: the
query (x - alpha mu) / sqrt(v), the log-bandwidth log(sigma / (alpha s)), the references (s_i - mu) / s and what kernel
smoothers of the support say (:mod:`nwflow.models.heads`). So the model is equivariant to shifts and scalings of the
support, and invariant to its order. A support without a scale (one point, or equal ones) takes ``config.scale``.

F is a vector of the network plus a combination, with coefficients of the network, of the query, of the denoisers of the
smoothers, and of the directions in which local Gaussians move the query: these turn with the support.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nwflow.models.config import ModelConfig
from nwflow.models.heads import Smoothers
from nwflow.models.layers import Feedforward, Fourier, Keys, Tower
from nwflow.models.schedule import Times, centred

__all__ = ["Preconditioned"]

REACH = 3.0  # root mean square, in units of c_out, beyond which vectors of the smoothers are compressed
TINY = 1e-12


class _Encoded(NamedTuple):
    mean: Tensor
    scale: Tensor
    points: Tensor
    mask: Tensor | None
    keys: Keys
    context: Tensor

    def task_count(self) -> int:
        return self.points.shape[0]


class _Units(NamedTuple):
    """The query and the schedule in units of the support: x, alpha, sigma, sqrt(v) and c_skip, c_out over s."""

    x: Tensor
    alpha: Tensor
    sigma: Tensor
    root: Tensor
    skip: Tensor
    out: Tensor


def _rms(v: Tensor) -> Tensor:
    return (v.square().mean(-1, keepdim=True) + TINY).sqrt()


class Preconditioned(nn.Module):
    """Network of the ``preconditioned`` preset: :meth:`encode` a support, then ask for :meth:`predict`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.width is not None and config.mlp_ratio is not None
        width, d, k = config.width, config.dim, config.smoothers
        self.fallback = config.scale
        self.radial, self.clock = Fourier(8, 40.0), Fourier(8, 8.0, 0.25)
        self.reference = nn.Linear(d + 17, width)
        self.reference_mlp = Feedforward(width, config.mlp_ratio)
        self.tower = Tower(config)
        self.context = nn.Linear(2, width)
        self.smoothers = Smoothers(k) if k else None
        self.query = nn.Linear(d * (1 + 2 * k) + 17 * (1 + k) + 17 + 5 * k, width)
        self.norm = nn.LayerNorm(width)
        self.vector, self.coefficients = nn.Linear(width, d), nn.Linear(width, 1 + 2 * k)

    def zero_output(self) -> None:
        """Start as the Wiener denoiser."""
        for linear in (self.vector, self.coefficients):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def _radius(self, v: Tensor) -> Tensor:
        r = _rms(v)
        return torch.cat([r, self.radial(r)], -1)

    def encode(self, points: Tensor, mask: Tensor | None) -> _Encoded:
        """``points`` ``(T, m, d)`` in the working dtype, zeros where masked."""
        dtype = self.vector.weight.dtype
        mean, rest = centred(points, mask)
        count = torch.full_like(mean[..., :1], points.shape[1]) if mask is None else mask.sum(1).to(mean)[:, None, None]
        variance = rest.square().mean(-1, keepdim=True).sum(1, keepdim=True) / (count - 1).clamp(min=1)
        flat = variance == 0
        scale = torch.where(flat, self.fallback**2, variance).sqrt()
        z = rest / scale
        tokens = self.reference(torch.cat([z.to(dtype), self._radius(z.to(dtype))], -1))
        tokens = self.reference_mlp(tokens)
        context = self.context(torch.cat([count.log(), flat.to(count)], -1).to(dtype))
        return _Encoded(mean, scale, z, mask, self.tower.keys(tokens, mask), context)

    def _units(self, x: Tensor, at: Times, encoded: _Encoded) -> _Units:
        sigma = at.sigma / encoded.scale
        root = (at.alpha.square() + sigma.square()).sqrt()
        local = (x - at.alpha * encoded.mean) / encoded.scale
        return _Units(local, at.alpha, sigma, root, at.alpha / root.square(), sigma / root)

    def residual(self, units: _Units, encoded: _Encoded) -> Tensor:
        """F ``(T, n, d)`` in the dtype of the parameters."""
        dtype = self.vector.weight.dtype
        x_in = (units.x / units.root).to(dtype)
        alpha, sigma = units.alpha, units.sigma
        bandwidth = ((sigma + 1e-4 * alpha) / (alpha + 1e-4 * sigma)).log().to(dtype)
        clock = torch.cat([0.25 * bandwidth, self.clock(bandwidth)], -1)
        vectors, features = [x_in[:, None]], [self._radius(x_in)]
        if self.smoothers is not None:
            found = self.smoothers(units.x, encoded.points, encoded.mask, alpha, sigma)
            out, skip = units.out.to(dtype)[:, None], units.skip.to(dtype)[:, None]
            moves = (found.denoised - skip * units.x.to(dtype)[:, None], found.along)
            vectors += [v / (out.square() + v.square().mean(-1, keepdim=True) / REACH**2 + TINY).sqrt() for v in moves]
            scalars = [found.n_eff.log(), found.residual.log1p(), (found.spread + TINY).sqrt()]
            scalars += [_rms(v) for v in vectors[1:]]
            scalars.append(self._radius(found.mean))
            features += [torch.cat(scalars, -1).transpose(1, 2).flatten(2)]
        basis = torch.cat(vectors, 1).transpose(1, 2)  # (T, n, 1 + 2 K, d)
        clock = clock.expand(*x_in.shape[:2], -1)
        token = self.query(torch.cat([basis.flatten(2), *features, clock], -1)) + encoded.context
        token = self.tower(token, encoded.keys, encoded.mask)
        token = self.norm(token)
        return self.vector(token) + (self.coefficients(token)[..., None, :] @ basis).squeeze(-2)

    def predict(self, x: Tensor, at: Times, encoded: _Encoded) -> tuple[Tensor, Tensor]:
        """Denoiser and noise ``(T, n, d)`` in the working dtype."""
        units = self._units(x, at, encoded)
        f = self.residual(units, encoded).to(x.dtype)
        denoised = encoded.mean + encoded.scale * (units.skip * units.x + units.out * f)
        return denoised, units.sigma / units.root.square() * units.x - units.alpha / units.root * f

    def loss(self, x: Tensor, x0: Tensor, x1: Tensor, at: Times, encoded: _Encoded, target: Tensor | None) -> Tensor:
        """Mean square of F less its target, ``(T, n)``; that of the denoiser ``target`` where given."""
        units = self._units(x, at, encoded)
        if target is None:  # the form that is regular at sigma = 0
            wanted = (units.sigma * (x1 - encoded.mean) / encoded.scale - units.alpha * x0) / units.root
        else:
            wanted = ((target - encoded.mean) / encoded.scale - units.skip * units.x) / units.out
        f = self.residual(units, encoded)
        return (f - wanted.to(f.dtype)).square().mean(-1)
