r"""Other ways to compute the denoiser of a support, each as its users write it.

In the paper's coordinates (t = 0 noise, t = 1 data) y = x / alpha and h = sigma / alpha:

    D = sum_i w_i s_i,    w = softmax(-|y - s_i|^2 / (2 h^2)).

A rival is built once on the points (what can be prebuilt is prebuilt, outside the clock) and called with queries. Each
is imported where it is used; what is missing raises :class:`Skipped` with one sentence.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2**26  # elements of one chunk of differences: 256 MiB of float32


class Skipped(Exception):
    """A rival that does not run here, and why."""


@dataclass(frozen=True)
class Query:
    """Queries ``x`` ``(n, d)`` float32 at time ``t``, where the path has ``alpha`` and ``sigma``."""

    x: Tensor
    t: float
    alpha: float
    sigma: float

    @property
    def h(self) -> float:
        return self.sigma / self.alpha

    @property
    def y(self) -> Tensor:
        return self.x / self.alpha

    def first(self, n: int) -> Query:
        return Query(self.x[:n], self.t, self.alpha, self.sigma)


class Floor:
    """The two products that no dense method avoids. What comes out is no denoiser: a floor for times alone."""

    def __init__(self, points: Tensor) -> None:
        self.s = points

    def __call__(self, q: Query) -> Tensor:
        logits = q.x @ self.s.T
        return logits @ self.s


class Broadcast:
    """Differences by broadcasting, as many queries at a time as 256 MiB hold, but at least one."""

    slow = True

    def __init__(self, points: Tensor) -> None:
        self.s = points

    def weights(self, q: Query) -> Tensor:
        chunks = q.y.split(max(1, CHUNK // self.s.numel()))
        square = torch.cat([(y[:, None] - self.s[None]).square().sum(-1) for y in chunks])
        return torch.softmax(square / (-2.0 * q.h**2), -1)

    def __call__(self, q: Query) -> Tensor:
        return self.weights(q) @ self.s


class Cdist:
    """``torch.cdist``, squared, softmax, product."""

    def __init__(self, points: Tensor) -> None:
        self.s = points

    def weights(self, q: Query) -> Tensor:
        return torch.softmax(torch.cdist(q.y, self.s) ** 2 / (-2.0 * q.h**2), -1)

    def __call__(self, q: Query) -> Tensor:
        return self.weights(q) @ self.s


class SDPA:
    """``scaled_dot_product_attention`` on lifted features: Gaussian logits as a plain dot product, keys prebuilt.

    The values are the points themselves, so they are narrower than the keys and PyTorch (2.13, CPU) takes its unfused
    path; :class:`FusedSDPA` shows the other one.
    """

    def __init__(self, points: Tensor) -> None:
        self.s = points
        norms = points.square().sum(-1, keepdim=True)
        self.k = torch.cat([points, torch.ones_like(norms), -0.5 * norms], -1)
        self.v = points

    def lift(self, q: Query) -> Tensor:
        v = q.sigma**2
        constant = torch.full_like(q.x[:, :1], q.alpha**2 / v)
        return torch.cat([q.alpha / v * q.x, -q.x.square().sum(-1, keepdim=True) / (2.0 * v), constant], -1)

    def weights(self, q: Query) -> Tensor:
        """Of the same logits: what the kernel sums is not visible from outside."""
        return torch.softmax(self.lift(q) @ self.k.T, -1)

    def __call__(self, q: Query) -> Tensor:
        four = (self.lift(q)[None, None], self.k[None, None], self.v[None, None])
        return F.scaled_dot_product_attention(*four, scale=1.0)[0, 0, :, : self.s.shape[-1]]


class FusedSDPA(SDPA):
    """The same with the lifted keys as values, of which two columns are thrown away: equal widths, fused kernel."""

    def __init__(self, points: Tensor) -> None:
        super().__init__(points)
        self.v = self.k


class DeepInverse:
    """deepinv's ``MMSE`` denoiser on a tensor that holds the whole support."""

    def __init__(self, points: Tensor) -> None:
        model = _deepinv_models().MMSE(dataloader=points[:, None, None], device=torch.device("cpu"))
        self.model = model

    def __call__(self, q: Query) -> Tensor:
        return self.model(q.y[:, None, None], sigma=q.h)[:, 0, 0]


def _deepinv_models(declared: bool = False):
    """deepinv.models. It imports torchvision, which does not load beside a PyTorch that it was not built with, for want
    of two operators that nothing here calls: they are declared, and the import tried once more."""
    try:
        import deepinv.models as models
    except ImportError as error:
        raise Skipped(f"deepinv does not load ({error}); benchmarks/README.md says how to install it") from None
    except RuntimeError as error:
        if declared or "torchvision::" not in str(error):
            raise Skipped(f"deepinv does not load: {error}") from None
        for name in [k for k in sys.modules if k.split(".")[0] in ("deepinv", "torchvision")]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float t) -> Tensor")
        return _deepinv_models(declared=True)
    return models


class KeOps:
    """``pykeops`` LazyTensor: symbolic differences, one fused loop compiled per dimension."""

    slow = True

    def __init__(self, points: Tensor) -> None:
        try:
            import pykeops
            from pykeops.torch import LazyTensor
        except ImportError as error:
            raise Skipped(f"KeOps does not load ({error}): pip install pykeops") from None
        pykeops.set_verbose(False)
        self.lazy, self.s = LazyTensor, LazyTensor(points[None])

    def __call__(self, q: Query) -> Tensor:
        logits = ((self.lazy(q.y[:, None]) - self.s) ** 2).sum(-1) * (-0.5 / q.h**2)
        return logits.sumsoftmaxweight(self.s, dim=1)


class TopK:
    """The heuristic of retrieval: the 1,024 nearest points by FAISS, the rest left out, and nothing said about them."""

    def __init__(self, points: Tensor, k: int = 1024) -> None:
        try:
            import faiss
        except ImportError as error:
            raise Skipped(f"FAISS does not load ({error}): pip install faiss-cpu") from None
        self.s, self.k, self.index = points, min(k, len(points)), faiss.IndexFlatL2(points.shape[1])
        self.index.add(points.numpy())

    def __call__(self, q: Query) -> Tensor:
        square, rows = self.index.search(q.y.contiguous().numpy(), self.k)
        w = torch.softmax(torch.from_numpy(square) / (-2.0 * q.h**2), -1)
        return torch.bmm(w[:, None], self.s[torch.from_numpy(rows)]).squeeze(1)


RIVALS = {
    "two products": Floor,
    "broadcasting": Broadcast,
    "cdist": Cdist,
    "SDPA": SDPA,
    "SDPA fused": FusedSDPA,
    "deepinv MMSE": DeepInverse,
    "KeOps": KeOps,
}
