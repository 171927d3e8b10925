r"""Held-out errors of every denoiser: the plug-in, the linear one, and the remedies, each fitted without the query.

Errors are ``(2, T, Q)``: both units of :class:`~nwflow.diagnose.heldout.Units`, times (t = 0 noise, t = 1 data),
queries. A metric has a path of its own, on which the linear denoiser is measured too (``<name> linear``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nwflow.diagnose import remedies
from nwflow.diagnose.heldout import Fold, Problem, denoise
from nwflow.diagnose.remedies import Gaussians, Pool
from nwflow.diagnose.shape import Shape, eigen, fit_shape
from nwflow.subspace import SubspaceField
from nwflow.support import Support

BLOCKS = (1, 4, 16, 64)  # sizes of the blocks of principal directions: the two smallest that are affordable
_BLOCK_WORK = 1e9  # weights of all heads together
OWN_PATH, PATCHES = "metric-", "patches-"
_PATCH_WORK = 2e9  # pairs of pixels that all patches may cost: fewer queries beyond
Progress = Callable[[str, float], None]


@dataclass
class Measured:
    """Errors by denoiser ``(2, T, Q)``; of the plug-in's weights n_eff, the largest and entropy ``(T, Q)``; settings
    that were fitted, one a fold; which queries were measured at all, ``(Q,)``."""

    errors: dict[str, Tensor]
    n_eff: Tensor
    largest: Tensor
    entropy: Tensor
    settings: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def put(self, problem: Problem, name: str, at: Tensor, values: Tensor) -> None:
        if name not in self.errors:
            self.errors[name] = torch.full((2, len(problem.grid.t), problem.n_queries), torch.nan, dtype=torch.float64)
        self.errors[name][:, :, at] = values


def names(problem: Problem, has_pool: bool) -> list[str]:
    """The remedies that are measured, in order."""
    kinds = ["isotropic", "diagonal", "low-rank", "full"]
    out = [f"smoothing-{k}" for k in kinds] + ["silverman", "scott"]
    out += [f"metric-{k}" for k in kinds[1:]] + (["metric-within-class"] if has_pool else [])
    seen = sum(len(f.at) * len(f.refs) for f in problem.folds) * len(problem.grid.t)
    blocks = [b for b in BLOCKS if b < problem.d and seen * problem.d / b <= _BLOCK_WORK][:2]
    return out + [f"subspace-{b}" for b in blocks] + (["pool"] if has_pool else [])


def measure(problem: Problem, pools: dict[int, list[Tensor]] | None, progress: Progress,
            only: Iterable[str] | None = None, refs: dict[int, Tensor] | None = None,
            images: Sequence[int] | None = None) -> Measured:  # fmt: skip
    """Every denoiser on every fold.

    Args:
        pools: by fold number, rows of every class that may be fitted, ``(n_c, d)`` each; None without a pool.
        only: names to measure (all when None); the plug-in and the linear denoiser always are.
        images: event shape where patches are to be measured too.
        refs: by fold (its place in ``problem.folds``) rows to use in place of all references, for a learning curve;
            folds without any are left out.
    """
    shape = (len(problem.grid.t), problem.n_queries)
    empty = torch.full(shape, torch.nan, dtype=torch.float64)
    out = Measured({}, empty, empty.clone(), empty.clone())
    wanted = list(only) if only is not None else names(problem, pools is not None)
    infos: dict[int, Pool] = {}
    for i, fold in enumerate(problem.folds):
        if refs is not None and i not in refs:
            continue
        rows = fold.refs if refs is None else refs[i]
        train = problem.points[rows[torch.isin(rows, fold.train)] if refs is not None else fold.train]
        if not len(train) or bool(problem.own(fold, rows).all(-1).any()):
            continue
        if pools is not None and fold.number not in infos:
            infos[fold.number] = remedies.fit_pool(pools[fold.number])
        one = _OneFold(problem, fold, rows, train, out)
        one.everything(wanted, None if pools is None else _for_class(infos[fold.number], pools[fold.number], fold.part))
        if images is not None:
            one.patches("patches-5", tuple(images))
        progress("held-out errors", (i + 1) / len(problem.folds))
    return out


def _for_class(info: Pool, classes: list[Tensor], part: int) -> Pool:
    return remedies._with_means(info, classes, part)


@dataclass
class _OneFold:
    """All denoisers for the queries of one fold."""

    problem: Problem
    fold: Fold
    rows: Tensor
    train: Tensor
    out: Measured

    def __post_init__(self) -> None:
        p = self.problem
        _, place, count = p.equal[self.rows].unique(return_inverse=True, return_counts=True)
        first = self.rows.new_empty(len(count)).index_copy_(0, place.flip(0), self.rows.flip(0))
        self.places = first  # equal references are one place of so much weight
        self.log_count = count.double().log() if len(count) < len(self.rows) else None
        self.refs = p.points[self.places]
        self.own = p.own(self.fold, self.places)
        self.own = self.own if bool(self.own.any()) else None
        self.centre = self.train.mean(0)
        self.shapes: dict[str, Shape] = {}
        self.x1, self.eps, self.x = p.noised(self.fold, self.centre)

    def everything(self, wanted: list[str], info: Pool | None) -> None:
        grid, z = self.problem.grid, self.refs - self.centre
        plug = denoise(self.x, grid.alpha, grid.sigma, z, z.new_zeros(z.shape[1]), self.own, self.log_count)
        self.put("plug-in", plug.denoised, None, self.x1)
        for name, values in (("n_eff", plug.n_eff), ("largest", plug.largest), ("entropy", plug.entropy)):
            getattr(self.out, name)[:, self.fold.at] = values
        self.gaussians("linear", remedies.linear(self.train, self.shape("full")))
        equal = self.problem.equal[self._train_rows()]
        for name in wanted:
            family, _, kind = name.partition("-")
            kind = kind.replace("-", "_")
            if family == "smoothing":
                self.gaussians(name, remedies.smooth_shape(self.train, self.shape(kind), equal))
            elif family in ("silverman", "scott"):
                self.gaussians(name, remedies.rule_of_thumb(self.train, family))
            elif family == "metric":
                within = info.within if info is not None and kind == "within_class" else None
                self.stretched(name, within or self.shape(kind))
            elif family == "subspace" and kind.isdigit():
                self.subspace(name, int(kind))
            elif family == "pool" and info is not None:
                self.gaussians(name, remedies.pool(self.train, info, equal))

    def shape(self, kind: str) -> Shape:
        if kind not in self.shapes:
            self.shapes[kind] = fit_shape(self.train, kind)
        return self.shapes[kind]

    def _train_rows(self) -> Tensor:
        return self.rows[torch.isin(self.rows, self.fold.train)]

    def put(self, name: str, denoised: Tensor, basis: Tensor | None, x1: Tensor) -> None:
        self.out.put(self.problem, name, self.fold.at, self.problem.units(denoised - x1, basis))

    def gaussians(self, name: str, g: Gaussians) -> None:
        """One smoothed support, in the eigenbasis of its covariance around its target."""
        grid, turn = self.problem.grid, (lambda v: v if g.basis is None else v @ g.basis)
        shift = g.target - self.centre
        x1 = turn(self.x1 - shift)
        x = grid.alpha[:, None, None] * x1 + grid.sigma[:, None, None] * turn(self.eps)
        if g.a == 0.0 or name == "linear":
            a, s = grid.alpha[:, None, None], grid.sigma[:, None, None]
            found = x * (a * g.variances / (a * a * g.variances + s * s))
        else:
            z = turn(g.a * (self.refs - g.centre))
            found = denoise(x, grid.alpha, grid.sigma, z, g.variances, self.own, self.log_count).denoised
        self.put(name, found, g.basis, x1)
        self.out.settings.setdefault(name, []).append(g.settings)

    def stretched(self, name: str, shape: Shape) -> None:
        """The plug-in and the linear denoiser on the path whose noise has the metric's shape, at the same log-SNR."""
        sd = shape.variances.sqrt()
        if float(sd.min()) == 0.0:
            return
        h = torch.exp(-0.5 * self.problem.grid.log_snr)
        one = torch.ones_like(h)
        z = shape.into(self.refs - self.centre) / sd
        x1 = shape.into(self.x1) / sd
        eps = self.eps if shape.basis is None else self.eps @ shape.basis
        x = x1 + h[:, None, None] * eps
        found = denoise(x, one, h, z, torch.zeros_like(sd), self.own, self.log_count).denoised
        self.put(name, found * sd, shape.basis, x1 * sd)
        own = shape.into(self.train - self.centre) / sd
        root = fit_shape(own, "full")
        turned = root.into(x)
        gain = root.variances / (root.variances + h[:, None, None] ** 2)
        self.put(name + " linear", root.back(turned * gain) * sd, shape.basis, x1 * sd)
        self.out.settings.setdefault(name, []).append(dict(shape.settings))

    def subspace(self, name: str, block: int) -> None:
        """Independent smoothers in blocks of consecutive principal directions of the references."""
        if not hasattr(self, "_principal"):
            self._principal = eigen(self.train - self.centre)[0]
        basis, grid = self._principal, self.problem.grid
        z, x1, x = (v @ basis for v in (self.refs - self.centre, self.x1, self.x))
        rank = min(len(self.train) - 1, z.shape[1])
        found = torch.zeros_like(x)
        for j in range(0, rank, block):
            at = slice(j, min(j + block, rank))
            zero = z.new_zeros(z[0, at].shape)
            part = denoise(x[..., at], grid.alpha, grid.sigma, z[:, at], zero, self.own, self.log_count)
            found[..., at] = part.denoised
        self.put(name, found, basis, x1)
        self.out.settings.setdefault(name, []).append({"block": float(block)})

    def patches(self, name: str, event: tuple[int, ...]) -> None:
        """Smoothers in image patches, for as many queries as the work allows; what equals a query is no reference."""
        grid, p = self.problem.grid, self.problem
        rows = self.places if self.own is None else self.places[~self.own.any(0)]
        work = len(grid.t) * max(1, len(rows)) * p.d * p.n_queries
        n = min(len(self.fold.at), max(1, int(len(self.fold.at) * min(1.0, _PATCH_WORK / work))))
        if len(rows) < 2 or (len(event) == 3 and event[0] not in (1, 3)) or min(event[-2:]) < 5:
            return
        at, centre = self.fold.at[:n], self.centre
        weights = None
        if self.log_count is not None:
            weights = self.log_count.exp() if self.own is None else self.log_count.exp()[~self.own.any(0)]
        field = SubspaceField.patches(Support((p.points[rows] - centre).reshape(-1, *event), weights=weights), size=5)
        x = self.x[:, :n].reshape(len(grid.t), n, *event)
        one = [
            field.denoise(v / (a + s), float(a / (a + s))) for v, a, s in zip(x, grid.alpha, grid.sigma, strict=True)
        ]
        found = torch.stack(one).reshape(len(grid.t), n, -1)
        p_units = p.units
        self.out.put(p, name, at, p_units(found - self.x1[:n]))
        self.out.put(p, name + " linear", at, self.out.errors["linear"][:, :, at])
        self.out.settings.setdefault(name, []).append({"size": 5.0})
