r"""One trajectory of samples on the field of one support: denoisers, and the samples that can be finished for good.

A sampler asks :class:`Engine` for D(x, t) node after node (t = 0 noise, t = 1 data). Beside D it learns which samples
have collapsed onto one reference so surely that the rest of their flow is one exact step
(:mod:`nwflow.kernel.certificate`): these leave the batch. Finding this out needs nothing but the largest weight of the
pass that D takes anyway; its index is looked up only where that weight is nearly 1.

Equal references would share their weight for ever, so that the engine works on the distinct ones, with their priors
added up: the same field, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from nwflow._moments import State, denoiser
from nwflow._pointset import first_equal
from nwflow.field import NWField
from nwflow.kernel.autograd import engine_keys, transforming
from nwflow.kernel.certificate import drift_bound, left_over
from nwflow.kernel.posterior import Keys, Want
from nwflow.support import Support

__all__ = ["Engine", "EngineName", "Evaluated", "Finish", "StepLog", "distinct"]

EngineName: TypeAlias = Literal["auto", "dense", "truncated"]
CERTIFYING = 1e-3  # accuracy of the pass that checks candidates, where the field's own passes have none


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of ``n`` samples.

    Attributes:
        denoised: ``(n, *event)``, dtype of x.
        end: ``(n,)``, the engine's index of the reference on which finishing by one exact step is certified, or -1.
        bound: ``(n,)``, how far x then errs at most, at unit noise scale; inf where ``end`` is -1.
        skipped: ``(n,)``, weight that truncation left out at most; 0 when dense.
        engine: what computed it.
        survivors: share of the (sample, reference) pairs that were scored exactly.
    """

    denoised: Tensor
    end: Tensor
    bound: Tensor
    skipped: Tensor
    engine: str
    survivors: float


@dataclass(frozen=True)
class StepLog:
    """What one evaluation did: its time, engine, samples asked, samples certified and share of pairs scored."""

    t: float
    engine: str
    asked: int
    certified: int
    survivors: float


@dataclass(frozen=True)
class Finish:
    """Samples that have left: the exact step from x ``(n, *event)`` at t onto references ``end`` ``(n, *event)``.

    ``spread`` is the variance of isotropic smoothing, 0 without it.
    """

    x: Tensor
    end: Tensor
    spread: float
    alpha: float
    sigma: float

    def variance(self, alpha: float, sigma: float) -> float:
        """v = sigma^2 + alpha^2 h0^2, of noise and smoothing together."""
        return sigma**2 + alpha**2 * self.spread

    def at(self, alpha: float, sigma: float) -> tuple[Tensor, Tensor]:
        """x and the denoiser at a later time: x_s = alpha_s s + sqrt(v_s / v_t) (x_t - alpha_t s)."""
        v = self.variance(alpha, sigma)
        keep = (v / self.variance(self.alpha, self.sigma)) ** 0.5
        x = (alpha - keep * self.alpha) * self.end + keep * self.x if keep > 0 else alpha * self.end
        pull = alpha * self.spread / v if v > 0 else 0.0
        return x, self.end + pull * (x - alpha * self.end) if pull else self.end.expand_as(x)


class Engine:
    """D(x, t) along one trajectory of ``n`` samples of a single set, with the collapse certificate.

    Args:
        field: an :class:`~nwflow.NWField`; of a field with tasks only denoisers are given.
        n: number of samples of the trajectory; ``rows`` of a call are numbers below it.
        engine: ``auto`` or ``dense``.
        certificate: whether to look for samples that can be finished.
        tol: most weight that may lie outside the reference a sample is finished on.

    Attributes:
        off: why there is no certificate, or None. log: a :class:`StepLog` for every call.
    """

    def __init__(self, field: NWField, n: int, *, engine: EngineName = "auto", certificate: bool = True,
                 tol: float = 1e-4) -> None:  # fmt: skip
        if engine not in get_args(EngineName):
            raise ValueError(f"engine: expected one of {get_args(EngineName)}, got {engine!r}")
        if not 0.0 < tol < 0.1:
            raise ValueError(f"tol: expected a share of weight in (0, 0.1), got {tol!r}")
        self.n, self.engine, self.tol, self.log = n, engine, tol, list[StepLog]()
        self.off = unavailable(field) if certificate else "not asked for"
        self._given, self._field = field, field
        self._exact: NWField | None = None
        self._ready = self.off is not None

    @property
    def field(self) -> NWField:
        """The field that is evaluated: that of the distinct references."""
        return self._field

    def __call__(self, x: Tensor, t: float, rows: Tensor) -> Evaluated:
        """D of samples ``rows`` ``(n_live,)`` at ``x`` ``(n_live, *event)``, and where they can be finished."""
        if self.off is not None:
            denoised = self._given.denoise(x, t)
            nowhere = torch.full(rows.shape, -1, dtype=torch.long, device=x.device)
            never = torch.full(
                rows.shape, torch.inf, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
            )
            found = Evaluated(denoised, nowhere, never, torch.zeros_like(never), "dense", 1.0)
        else:
            self._prepare(x)
            fast = self._field.accuracy is None  # its fused pass knows no largest weight
            s = self._field._solve(x, t, Want() if fast else self._want(mean=True), refuse=())
            end, bound = self._suspected(s, x, t) if fast else self._certified(s, x)
            denoised = denoiser(s).reshape(x.shape).to(x.dtype)
            found = Evaluated(denoised, end, bound, torch.zeros_like(bound), "dense", 1.0)
        self.log.append(StepLog(float(t), found.engine, len(rows), int((found.end >= 0).sum()), found.survivors))
        return found

    def certify(self, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        """``end`` and ``bound`` ``(n,)`` of :class:`Evaluated` at ``x`` ``(n, *event)``, without denoisers."""
        self._prepare(x)
        assert self._exact is not None
        return self._certified(self._exact._solve(x, t, self._want(mean=False), refuse=()), x)

    def finish(self, x: Tensor, end: Tensor, alpha: float, sigma: float) -> Finish:
        """The exact step of samples at ``x`` onto the engine's references ``end`` ``(n,)``."""
        points = self._field._stacked()[0]
        slots = self._field._frames.slots
        at = end if slots is None else slots[end]
        frame = self._field._frame()
        spread = float(frame.spread.reshape(-1)[0])
        return Finish(x, points[at].reshape(x.shape).to(x.dtype), spread, alpha, sigma)

    def references(self, end: Tensor) -> Tensor:
        """The caller's row numbers of the engine's references ``end`` ``(n,)``; of equal ones the first."""
        slots = self._field._frames.slots
        return self._field.rows[end if slots is None else slots[end]]

    def _want(self, mean: bool) -> Want:
        return Want(mean=mean, top=1, share=1.0 - 2.0 * self.tol, rest=0.5 * self.tol)

    def _prepare(self, x: Tensor) -> None:
        if not self._ready:
            self._field = distinct(self._given, self._keys(self._given, x))
            self._exact = self._field
            if self._field.accuracy is None:
                self._exact = self._field.with_accuracy(CERTIFYING)
                self._exact._cache, self._exact._frames = self._field._cache, self._field._frames
            self._ready = True

    @staticmethod
    def _keys(field: NWField, x: Tensor) -> Keys:
        with torch.no_grad():
            return engine_keys(field._cache, *field._engine(field._frame()), field._compute(x))

    def _suspected(self, s: State, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        """As :meth:`_certified` after a pass without weights: certain for those whose mean has the logit of all.

        Where one point has all the weight, the mean is that point, and its logit is the log-sum-exp.
        """
        found, prior = s.found, self._keys(self._field, x).log_prior
        assert found.mean is not None and found.error is not None
        rest = (found.lse - (s.y * found.mean).sum(-1) + 0.5 * (s.b * found.mean.square()).sum(-1))[0]
        slack = 0.01 + found.error[0]
        rows = ((rest > prior.amin() - slack) & (rest < prior.amax() + slack)).nonzero().squeeze(-1)
        end = torch.full(rest.shape, -1, dtype=torch.long, device=x.device)
        bound = torch.full_like(rest, torch.inf)
        if rows.numel():
            end[rows], bound[rows] = self.certify(x[rows], t)
        return end, bound

    def _certified(self, s: State, x: Tensor) -> tuple[Tensor, Tensor]:
        """Engine indices (or -1) and bounds ``(n,)``."""
        found = s.found
        assert found.weights is not None and found.index is not None and found.error is not None
        keys = self._keys(self._field, x)
        weight, index = found.weights[0, :, 0], found.index[0, :, 0]
        q = left_over(weight, found.error[0], self._rest)
        lowest = keys.log_prior.amin()
        prior_lead = keys.log_prior[index.clamp(min=0)] - lowest
        reach = s.b.amax(-1).sqrt().reshape(-1) * keys.radius
        bound = drift_bound(q, reach, prior_lead)
        sure = (index >= 0) & (q <= self.tol) & torch.isfinite(bound)
        return torch.where(sure, index, -1), torch.where(sure, bound, torch.inf)

    @property
    def _rest(self) -> float:
        return 0.5 * min(self.tol, self._field.accuracy or CERTIFYING)


def unavailable(field: NWField) -> str | None:
    """Why no certificate exists for this field, or None."""
    if field.is_batch:
        return "the field has tasks"
    if transforming() or (torch.is_grad_enabled() and any(p.requires_grad for p in field.parameters())):
        return "derivatives are recorded"
    spread = field._frame().spread
    if bool((spread != spread.reshape(-1)[0]).any()):
        return "the smoothing is not isotropic in the metric, and then a lead can fall"
    return None


def distinct(field: NWField, keys: Keys) -> NWField:
    """The field of the different points of ``field``, their priors added up; ``field`` itself where all differ.

    Only points of nearly equal norm are compared.
    """
    slots: Any = field._frames.slots
    square, order = keys.square.sort()
    close = square.diff() <= 4.0 * field.d * torch.finfo(square.dtype).eps * square[1:]
    if not bool(close.any()):
        return field
    maybe = torch.zeros_like(square, dtype=torch.bool)
    maybe[1:] |= close
    maybe[:-1] |= close
    maybe = order[maybe].sort().values  # ascending, so that the first of equal ones is the first row
    first = torch.arange(keys.m, device=square.device)
    first[maybe] = maybe[first_equal(field.points.detach()[maybe if slots is None else slots[maybe]], None)]
    kept = (first == torch.arange(keys.m, device=square.device)).nonzero().squeeze(-1)
    if len(kept) == keys.m:
        return field
    return _merged(field, first, kept)


def _merged(field: NWField, first: Tensor, kept: Tensor) -> NWField:
    slots: Any = field._frames.slots
    prior = field._engine(field._frame())[1][0].exp()
    total = torch.zeros_like(prior).index_add_(0, first, prior)[kept]
    at = kept if slots is None else slots[kept]
    support = Support(field.points.detach()[at], weights=total, rows=field.rows[at])
    return NWField(support, field.path, field.metric, field.smoothing, field.accuracy)
