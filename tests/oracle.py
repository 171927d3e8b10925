r"""A float64 oracle of the field: loops over queries, dense matrices, direct differences, nothing shared with nwflow.

With noise covariance N = M^-1, smoothing covariance Sigma and one Gaussian N(alpha s_i, V), V = sigma^2 N + alpha^2
Sigma, for every point (t = 0 noise, t = 1 data), everything follows from w_i ~ pi_i N(x; alpha s_i, V):

    D = sum_i w_i (s_i + alpha Sigma V^-1 (x - alpha s_i))        eps = sum_i w_i sigma N V^-1 (x - alpha s_i)
    score = -sum_i w_i V^-1 (x - alpha s_i)                       u = alpha' D + sigma' eps
    dm/dx = alpha C V^-1,  m = sum_i w_i s_i                      tr du/dx from the two Jacobians
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ("denoiser", "velocity", "score", "noise", "log_density", "divergence", "n_eff", "entropy", "covariance_trace")


def one_query(x, alpha, sigma, d_alpha, d_sigma, s, log_prior, noise, smoothing) -> dict[str, np.ndarray | float]:
    """Every quantity at one point ``x`` ``(d,)`` for points ``s`` ``(m, d)``; all arrays float64."""
    d = len(x)
    v = sigma**2 * noise + alpha**2 * smoothing
    inverse = np.linalg.inv(v)
    r = x - alpha * s
    quadratic = np.array([ri @ inverse @ ri for ri in r])
    logits = log_prior - quadratic / 2
    top = logits.max()
    lse = top + math.log(np.exp(logits - top).sum())
    w = np.exp(logits - lse)
    m = w @ s
    denoiser = m + alpha * smoothing @ inverse @ (w @ r)
    eps = sigma * noise @ inverse @ (w @ r)
    c = (s - m).T @ ((s - m) * w[:, None])
    dm = alpha * c @ inverse
    eye = np.eye(d)
    d_denoiser = dm + alpha * smoothing @ inverse @ (eye - alpha * dm)
    d_eps = sigma * noise @ inverse @ (eye - alpha * dm)
    some = w[w > 0]
    return {
        "weights": w,
        "denoiser": denoiser,
        "noise": eps,
        "score": -inverse @ (w @ r),
        "velocity": d_alpha * denoiser + d_sigma * eps,
        "log_density": lse - 0.5 * (d * math.log(2 * math.pi) + np.linalg.slogdet(v)[1]),
        "divergence": d_alpha * np.trace(d_denoiser) + d_sigma * np.trace(d_eps),
        "n_eff": 1 / (w**2).sum(),
        "entropy": -(some * np.log(some)).sum(),
        "covariance_trace": np.trace(c),
        "jacobian": d_denoiser,
    }


def field(x: Tensor, t, points: Tensor, path, prior=None, metric=None, smoothing=None) -> SimpleNamespace:
    """All of :func:`one_query` for queries ``(*batch, *event)`` and one set ``(m, *event)``, as float64 tensors.

    ``t`` broadcasts to the batch; ``prior`` ``(m,)`` unnormalised, ``metric`` and ``smoothing`` ``(d, d)``.
    """
    event = points.shape[1:]
    d, batch = max(1, event.numel()), x.shape[: x.ndim - len(event)]
    s = points.detach().double().reshape(len(points), d).numpy()
    q = x.detach().double().reshape(-1, d).numpy()
    prior = np.ones(len(s)) if prior is None else np.asarray(prior, dtype=np.float64)
    real = prior > 0
    log_prior = np.log(prior[real] / prior.sum())
    noise = np.eye(d) if metric is None else np.linalg.inv(np.asarray(metric, dtype=np.float64))
    sigma0 = np.zeros((d, d)) if smoothing is None else np.asarray(smoothing, dtype=np.float64)
    at = path(t)
    schedule = np.stack(
        [v.double().expand(batch).reshape(-1).numpy() for v in (at.alpha, at.sigma, at.d_alpha, at.d_sigma)]
    )
    rows = [one_query(qi, *map(float, k), s[real], log_prior, noise, sigma0) for qi, k in zip(q, schedule.T)]
    out = {}
    for name in (*NAMES, "weights", "jacobian"):
        value = torch.from_numpy(np.stack([np.asarray(r[name], dtype=np.float64) for r in rows]))
        if name in ("denoiser", "velocity", "score", "noise"):
            value = value.reshape(batch + event)
        elif name == "weights":
            full = torch.zeros(len(rows), len(prior), dtype=torch.float64)
            full[:, torch.from_numpy(real)] = value
            value = full.reshape((*batch, len(prior)))
        else:
            value = value.reshape(batch + value.shape[1:])
        out[name] = value
    return SimpleNamespace(**out)


def logits(x: Tensor, alpha, sigma, points: Tensor) -> Tensor:
    """-|x - alpha s|^2 / (2 sigma^2), ``(n, m)``, by direct differences, for sizes where the loops above are slow."""
    rows = []
    for i in range(len(x)):
        a, v = (float(torch.as_tensor(q, dtype=torch.float64).expand(len(x))[i]) for q in (alpha, sigma))
        rows.append(-0.5 * (x[i].double() - a * points.double()).div_(v).square_().sum(-1))
    return torch.stack(rows)


def weights(x: Tensor, alpha, sigma, points: Tensor) -> Tensor:
    """Weights ``(n, m)`` of queries ``(n, d)`` over ``(m, d)`` under a uniform prior."""
    return torch.softmax(logits(x, alpha, sigma, points), -1)


def variation(p: Tensor, q: Tensor) -> Tensor:
    """Total variation between rows of two matrices of weights."""
    return 0.5 * (p.double() - q.double()).abs().sum(-1)


class Watch(TorchDispatchMode):
    """While active: elements and bytes of the largest tensor made, and the operations that made float64 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.bytes, self.wide = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for v in torch.utils._pytree.tree_leaves(out):
            if isinstance(v, Tensor):
                size = v.untyped_storage().nbytes()
                self.numel, self.bytes = max(self.numel, size // v.element_size()), max(self.bytes, size)
                if v.dtype == torch.float64 and v.ndim > 0:
                    self.wide.add(str(func))
        return out
