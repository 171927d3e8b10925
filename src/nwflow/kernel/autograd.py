r"""Derivatives of the streaming pass, of first and second order, recomputed block by block.

With lifted queries Q = [y, b, 1] and lifted keys K_i = [z_i, -f_i / 2, log pi_i] a log-weight is l_i = Q . K_i. Then

    L = log sum_i exp l_i,        O = sum_i w_i K_i = dL/dQ,        w_i = exp(l_i - L)

are all that a field needs, and every derivative is again a sum over pairs, given (L, O). With cotangents g of L and G
of O, a_i = g + G . (K_i - O) (the *centred* covariance: nothing large cancels when the weights concentrate),

    first order    dQ = sum_i w_i a_i K_i                    dK_i = sum_q w_i (a_i Q + G)

and with cotangents u of dQ and k_i of dK_i, c_i = u . K_i + k_i . Q, p_i = a_i c_i + k_i . G,

    second order   dQ = sum_i w_i (p_i K_i + a_i k_i)        dK_i = sum_q w_i (p_i Q + c_i G + a_i u)
                   dL = -sum_i w_i p_i                       dO   = -G sum_i w_i c_i
                   dg = sum_i w_i c_i                        dG   = sum_i w_i (c_i (K_i - O) + k_i).

The last line is also the forward-mode derivative of (L, O) with tangents (u, k). K depends on the points through z and
f alone: dz_i = [dK_i]_z - [dK_i]_f z_i. Backward and double backward hold one block of pairs at a time; forward mode
does so unless it is itself differentiated. No time enters here; see :mod:`nwflow.field` for its direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nwflow.kernel.posterior import Keys, Moments, Want, full_precision, prepare, stacked
from nwflow.kernel.rescore import posterior

PAIRS = 2**19  # pairs of a block; a handful of such blocks live at a time
ROWS = 2**20  # elements of one block of lifted keys

Optional = Tensor | None
Function = TypeVar("Function", bound=Callable[..., Any])
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


class KeyCache:
    """Remembers the centred copy of a support's points for as long as neither they nor the frame change."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, tuple[tuple[Any, ...], tuple[Tensor, ...], Keys]] = {}

    def keys(self, points: Tensor, log_prior: Tensor, shift: Tensor, scale: Tensor, compute: torch.dtype) -> Keys:
        tensors = (points, shift, scale, log_prior)
        now, (before, _, keys) = stamp(*tensors), self._kept.get(compute, (None, (), None))
        if keys is None or now != before:
            with torch.no_grad():
                keys = prepare(points.detach(), shift.detach(), scale.detach(), log_prior.detach(), compute)
            self._kept[compute] = (now, tensors, keys)  # the tensors are held so that no other takes their address
        return keys


def unwrapped(v: Tensor) -> Tensor:
    """The plain tensor inside functorch's wrappers."""
    while _functorch.is_functorch_wrapped_tensor(v):
        v = _functorch.get_unwrapped(v)
    return v


def stamp(*tensors: Tensor) -> tuple[Any, ...]:
    """Equal only for the same storage in the same state: what a cache of derived tensors compares."""
    return tuple(
        (t.data_ptr(), -1 if t.is_inference() else t._version, tuple(t.shape), t.stride(), t.dtype, t.device)
        for t in map(unwrapped, tensors)
    )


def solve(cache: KeyCache, y: Tensor, b: Tensor, points: Tensor, log_prior: Tensor, shift: Tensor, scale: Tensor,
          compute: torch.dtype, tol: float | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Differentiable ``(L (T, n), O (T, n, d + r + 1))``; ``shift``, ``scale`` are constants ``(T or 1, 1, d or 1)``.

    Differentiable in ``y`` ``(T, n, d)``, ``b`` ``(T, n or 1, 1 or d)``, ``points`` ``(T, m, d)``, ``log_prior``
    ``(T, m)``, twice, in every mode except nested forward mode.

    Raises:
        RuntimeError: nested forward mode, whose inner tangents PyTorch would silently drop.
    """
    _refuse_nested_forward()
    return _Solve.apply(y, b, points, log_prior, shift, scale, (cache, compute, tol))  # type: ignore[return-value]


def eager(function: Function) -> Function:
    """Left out of ``torch.compile``: the engine decides by numbers, so the graph breaks here and eager code runs."""
    return torch.compiler.disable(function)  # pyright: ignore[reportReturnType, reportCallIssue, reportArgumentType]


def transforming() -> bool:
    """True inside a ``torch.func`` transform or a forward-mode level: derivatives may be asked for by others."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _refuse_nested_forward() -> None:
    stack = _functorch.get_interpreter_stack() or []
    if sum(i.key() == _functorch.TransformType.Jvp for i in stack) > 1:
        raise RuntimeError(
            "nested forward mode (jvp of jvp, jacfwd of jacfwd) is not supported by nwflow fields: its result would be "
            "silently wrong. Use reverse over forward, forward over reverse (torch.func.hessian) or two reverse modes."
        )


def engine_keys(cache: KeyCache, points: Tensor, log_prior: Tensor, shift: Tensor, scale: Tensor,
                compute: torch.dtype) -> Keys:  # fmt: skip
    """:class:`Keys` of a stack of tasks; a stack of one whose points all count is a single set (two-dimensional)."""
    keys = cache.keys(points, log_prior, shift, scale, compute)
    return keys.task(0) if points.shape[0] == 1 and keys.valid is None else keys


def run(cache: KeyCache, y: Tensor, b: Tensor, points: Tensor, log_prior: Tensor, shift: Tensor, scale: Tensor,
        compute: torch.dtype, tol: float | None, want: Want) -> Moments:  # fmt: skip
    """Moments without derivatives; shapes as in :func:`solve`, every result with its leading task axis."""
    keys = engine_keys(cache, points, log_prior, shift, scale, compute)
    if keys.points.ndim == 3:
        return posterior(y, b, keys, want, tol)
    return stacked(posterior(y[0], b[0], keys, want, tol))


# --------------------------------------------------------------------------------------------- blocks of lifted pairs


def _lift_queries(y: Tensor, b: Tensor) -> Tensor:
    b = b.expand(*y.shape[:-1], b.shape[-1])
    return torch.cat([y, b, torch.ones_like(y[..., :1])], -1)


def _spread(r: int, z: Tensor, v: Tensor) -> Tensor:
    """The f part of the lifted tangent of a point: -z . v (one b) or -z v (d of them)."""
    return -(z * v).sum(-1, keepdim=True) if r == 1 else -z * v


def _lift_keys(r: int, z: Tensor, log_prior: Tensor, dz: Optional, dp: Optional) -> tuple[Tensor, Optional]:
    """K of a block and, with tangents or cotangents ``dz`` and ``dp`` of z and log pi, their lifted counterpart."""
    k = torch.cat([z, 0.5 * _spread(r, z, z), log_prior[..., None]], -1)
    if dz is None and dp is None:
        return k, None
    dz = torch.zeros_like(z) if dz is None else dz
    last = torch.zeros_like(z[..., :1]) if dp is None else dp[..., None]
    return k, torch.cat([dz, _spread(r, z, dz), last.expand(*z.shape[:-1], 1)], -1)


def _lower_keys(r: int, dk: Tensor, z: Tensor, scale: Tensor, extra: Optional = None) -> tuple[Tensor, Tensor]:
    """From gradients of K to gradients of (points, log prior); ``extra`` is added to that of z."""
    d = z.shape[-1]
    dz = dk[..., :d] - dk[..., d : d + r] * z
    return (dz if extra is None else dz + extra) * scale, dk[..., -1]


Block = Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]


def _sweep(block: Block, y: Tensor, b: Tensor, points: Tensor, log_prior: Tensor, shift: Tensor, scale: Tensor,
           lse: Tensor, queries: Sequence[Optional], d_points: Optional = None, d_prior: Optional = None,
           keys_too: bool = True) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Sum ``block`` over all pairs of blocks: per-query sums are joined over queries, per-key sums over keys.

    ``block(Q, K, dK, w, z, dz, *queries)`` returns what to add per query and per key. Nothing is changed in place,
    so that the sweep may itself be transformed.
    """
    r, n, (tasks, m, d) = b.shape[-1], y.shape[-2], points.shape
    kb = max(1, min(m, ROWS // max(1, tasks * (d + r + 1))))
    qb = max(1, min(n, PAIRS // max(1, tasks * kb)))
    lifted = _lift_queries(y, b)
    per_query: list[list[Tensor] | None] = [None] * max(1, -(-n // qb))
    per_key: list[list[Tensor]] = []
    for j in range(0, m, kb):
        keys = min(kb, m - j)  # narrow, not slices: a slice of everything is an alias, which legacy vmap does not know
        z = (points.narrow(1, j, keys).to(shift.dtype) - shift) * scale
        lp = log_prior.narrow(1, j, keys)
        valid = lp > -torch.inf
        lp, z = torch.where(valid, lp, 0.0), torch.where(valid[..., None], z, 0.0)
        dz = None if d_points is None else d_points.narrow(1, j, keys).to(z.dtype) * scale
        k, dk = _lift_keys(r, z, lp, dz, None if d_prior is None else d_prior.narrow(1, j, keys))
        sums: list[Tensor] | None = None
        for i, start in enumerate(range(0, max(n, 1), qb)):
            rows = min(qb, n - start)
            q = lifted.narrow(1, start, rows)
            rest = [None if v is None else v.narrow(1, start, rows) for v in queries]
            w = torch.exp(q @ k.mT - lse.narrow(1, start, rows).unsqueeze(-1)) * valid.unsqueeze(1)
            mine, theirs = block(q, k, dk, w, *rest)
            old = per_query[i]
            per_query[i] = list(mine) if old is None else [u + v for u, v in zip(old, mine, strict=True)]
            if keys_too:
                sums = list(theirs) if sums is None else [u + v for u, v in zip(sums, theirs, strict=True)]
        if keys_too and sums is not None:
            per_key.append([*sums, z] if dz is None else [*sums, z, dz])
    across = [torch.cat(parts, 1) for parts in zip(*(p for p in per_query if p is not None), strict=True)]
    return across, [torch.cat(parts, 1) for parts in zip(*per_key, strict=True)]


def _split_query(dq: Tensor, b: Tensor, d: int) -> tuple[Tensor, Tensor]:
    db = dq[..., d : d + b.shape[-1]]
    return dq[..., :d], db.sum(-2, keepdim=True) if b.shape[-2] == 1 else db


def _dot(a: Tensor, k: Tensor) -> Tensor:
    return a @ k.mT


def _first(q: Tensor, k: Tensor, dk: Any, w: Tensor, o: Tensor, g: Tensor, co: Tensor) -> Any:
    e = w * (_dot(co, k) - ((co * o).sum(-1) - g)[..., None])
    return (e @ k,), (e.mT @ q + w.mT @ co,)


def _second(q: Tensor, k: Tensor, dk: Optional, w: Tensor, o: Tensor, g: Tensor, co: Tensor, u: Tensor) -> Any:
    a = _dot(co, k) - ((co * o).sum(-1) - g)[..., None]
    c = _dot(u, k) if dk is None else _dot(u, k) + _dot(q, dk)
    wa, wc, wp = w * a, w * c, w * (a * c if dk is None else a * c + _dot(co, dk))
    mass = wc.sum(-1, keepdim=True)
    d_q, d_co = wp @ k, wc @ k - mass * o
    if dk is not None:
        d_q, d_co = d_q + wa @ dk, d_co + w @ dk
    mine = (d_q, -wp.sum(-1, keepdim=True), -co * mass, mass, d_co)
    return mine, (wp.mT @ q + wc.mT @ co + wa.mT @ u, wa.mT @ q + w.mT @ co)


def _tangent(q: Tensor, k: Tensor, dk: Optional, w: Tensor, o: Tensor, u: Tensor) -> Any:
    c = _dot(u, k) if dk is None else _dot(u, k) + _dot(q, dk)
    wc = w * c
    mass = wc.sum(-1, keepdim=True)
    d_o = wc @ k - mass * o
    return (mass, d_o if dk is None else d_o + w @ dk), ()


def _first_tangent(q: Tensor, k: Tensor, dk: Optional, w: Tensor, o: Tensor, g: Tensor, co: Tensor, u: Tensor,
                   dl: Tensor, do: Tensor, dg: Tensor, dco: Tensor) -> Any:  # fmt: skip
    """Tangent of :func:`_first`: u and dk of the lifted inputs, the others of (L, O, g, G)."""
    a = _dot(co, k) - ((co * o).sum(-1) - g)[..., None]
    c = _dot(u, k) if dk is None else _dot(u, k) + _dot(q, dk)
    dw = w * (c - dl[..., None])
    da = _dot(dco, k) + (dg - (dco * o).sum(-1) - (co * do).sum(-1))[..., None]
    if dk is not None:
        da = da + _dot(co, dk)
    e, de = w * a, dw * a + w * da
    d_q = de @ k if dk is None else de @ k + e @ dk
    return (d_q,), (de.mT @ q + e.mT @ u + dw.mT @ co + w.mT @ dco, e.mT @ q + w.mT @ co)


# ------------------------------------------------------------------------------------------------- autograd functions


def _tangent_queries(y: Tensor, b: Tensor, ty: Optional, tb: Optional) -> Tensor:
    ty = torch.zeros_like(y) if ty is None else ty.to(y.dtype)
    tb = torch.zeros_like(b) if tb is None else tb
    u = torch.cat([ty, tb.expand(*y.shape[:-1], b.shape[-1])], -1)
    return torch.cat([u, torch.zeros_like(y[..., :1])], -1)


class _Solve(torch.autograd.Function):
    """(L, O) by the engine, to its accuracy; derivatives by :class:`_First` and :func:`_tangent`."""

    @staticmethod
    def forward(y, b, points, log_prior, shift, scale, how):  # type: ignore[override]
        cache, compute, tol = how
        found = run(cache, y, b, points, log_prior, shift, scale, compute, tol, Want(square=True, prior=True))
        assert found.mean is not None and found.square is not None and found.prior is not None
        o = torch.cat([found.mean, -0.5 * found.square, found.prior[..., None]], -1)
        return found.lse, o.to(y.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensors = (*inputs[:6], *output)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, g, co):  # type: ignore[override]
        y, b, points, log_prior, shift, scale, lse, o = ctx.saved_tensors
        keys_too = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        dy, db, dpoints, dprior = _First.apply(y, b, points, log_prior, shift, scale, lse, o, g, co, keys_too)
        return dy, db, dpoints if keys_too else None, dprior if keys_too else None, None, None, None

    @staticmethod
    def jvp(ctx, ty, tb, tpoints, tprior, *_):  # type: ignore[override]
        y, b, points, log_prior, shift, scale, lse, o = ctx.saved_tensors
        u = _tangent_queries(y, b, ty, tb)
        args = (_tangent, y, b, points, log_prior, shift, scale, lse, (o, u), tpoints, tprior)
        (dl, do), _ = _sweep(*args, keys_too=False)
        return dl.squeeze(-1), do

    @staticmethod
    def vmap(info, in_dims, y, b, points, log_prior, shift, scale, how):  # type: ignore[override]
        args, dims = [y, b, points, log_prior, shift, scale], list(in_dims[:6])
        args = [a if d is None else a.movedim(d, 0) for a, d in zip(args, dims, strict=True)]
        v, tasks, n = info.batch_size, args[2].shape[-3], args[0].shape[-2]
        if all(d is None for d in dims[2:]):  # one support: more queries
            if dims[0] is None:
                args[0] = args[0].expand(v, *args[0].shape)
            y = args[0].movedim(0, 1).reshape(tasks, v * n, -1)
            b = args[1]
            if dims[1] is not None:
                b = b.expand(v, tasks, n, b.shape[-1]).movedim(0, 1).reshape(tasks, v * n, -1)
            elif b.shape[-2] > 1:
                b = b[:, None].expand(tasks, v, n, b.shape[-1]).reshape(tasks, v * n, -1)
            lse, o = _Solve.apply(y, b, *args[2:], how)  # type: ignore[misc]
            return (lse.view(tasks, v, n).movedim(1, 0), o.view(tasks, v, n, -1).movedim(1, 0)), (0, 0)
        args = [a if d is not None else a.expand(v, *a.shape) for a, d in zip(args, dims, strict=True)]
        full = [a.expand(v, tasks, *a.shape[2:]).reshape(v * tasks, *a.shape[2:]) for a in args]
        lse, o = _Solve.apply(*full, (KeyCache(), *how[1:]))  # type: ignore[misc]
        return (lse.view(v, tasks, n), o.view(v, tasks, n, -1)), (0, 0)


class _First(torch.autograd.Function):
    """The vector-Jacobian product of :class:`_Solve` as a function of everything it depends on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y, b, points, log_prior, shift, scale, lse, o, g, co, keys_too):  # type: ignore[override]
        args = (y, b, points, log_prior, shift, scale, lse, (o, g, co))
        with full_precision():
            (dq,), per_key = _sweep(_first, *args, keys_too=keys_too)
        dy, db = _split_query(dq, b, y.shape[-1])
        if not keys_too:
            return dy, db, y.new_zeros(()), y.new_zeros(())
        dk, z = per_key
        dz, dp = _lower_keys(b.shape[-1], dk, z, scale)
        return dy, db, dz.to(points.dtype), dp

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.keys_too = inputs[-1]
        ctx.save_for_backward(*inputs[:10])
        ctx.save_for_forward(*inputs[:10])

    @staticmethod
    def backward(ctx, uy, ub, kpoints, kprior):  # type: ignore[override]
        y, b, points, log_prior, shift, scale, lse, o, g, co = ctx.saved_tensors
        r, d, too = b.shape[-1], y.shape[-1], any(ctx.needs_input_grad[2:4])
        u = _tangent_queries(y, b, uy, ub)
        cotangents = (kpoints, kprior) if ctx.keys_too else (None, None)
        args = (y, b, points, log_prior, shift, scale, lse, (o, g, co, u), *cotangents)
        with full_precision():
            (dq, dl, do, dg, dco), per_key = _sweep(_second, *args, keys_too=too)
        dy, db = _split_query(dq, b, d)
        dz = dp = None
        if too:
            dk, dk_first, z, *rest = per_key
            extra = -dk_first[..., d : d + r] * rest[0] if rest else None
            dz, dp = _lower_keys(r, dk, z, scale, extra)
            dz = dz.to(points.dtype)
        return dy, db, dz, dp, None, None, dl.squeeze(-1), do, dg.squeeze(-1), dco, None

    @staticmethod
    def jvp(ctx, ty, tb, tpoints, tprior, ts, tc, tl, to, tg, tco, _):  # type: ignore[override]
        y, b, points, log_prior, shift, scale, lse, o, g, co = ctx.saved_tensors
        r, d = b.shape[-1], y.shape[-1]
        u = _tangent_queries(y, b, ty, tb)
        zeros = [torch.zeros_like(v) if t is None else t for v, t in ((lse, tl), (o, to), (g, tg), (co, tco))]
        args = (y, b, points, log_prior, shift, scale, lse, (o, g, co, u, *zeros), tpoints, tprior)
        (dq,), per_key = _sweep(_first_tangent, *args, keys_too=ctx.keys_too)
        dy, db = _split_query(dq, b, d)
        if not ctx.keys_too:
            return dy, db, y.new_zeros(()), y.new_zeros(())
        dk, dk_first, z, *rest = per_key
        extra = -dk_first[..., d : d + r] * rest[0] if rest else None
        dz, dp = _lower_keys(r, dk, z, scale, extra)
        return dy, db, dz.to(points.dtype), dp
