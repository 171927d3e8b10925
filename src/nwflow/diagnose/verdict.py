r"""From held-out errors to gauges and a verdict: each regime is measured by the intervention that repairs it.

Over the window (log-SNR where the linear denoiser leaves between 5 and 97 % of the variance), with P, I, B the errors
of the plug-in, of isotropic smoothing and of the best adapted denoiser on the same path, n the mean n_eff (t = 0 noise,
t = 1 data):

    collapse   sum of (P - I)+ where n < 3, over the sum of P
    geometry   the largest of: the greatest (P - B) / P - CHANCE / (1 + n) where n >= 3 (n effective references leave
               1 / (1 + n) by chance, half of which is taken off); sum of (I - S)+
               over the sum of P, S the best shaped covariance; (skill of the best metric - skill of the plug-in) /
               (1 - skill of the plug-in)
    scarcity   the larger of 1 - (error of the best remedy with m references / with m / 2)^2, what four times as many
               would remove, and sum of (P - L)+ over the sum of P, L the error of ``pool``, where other classes' data
               leave at least 5 % less error than anything that these references alone can do

All are shares of error removed. Below HEALTHY, and with no remedy that gains MUCH, nothing is worth repairing.
Intervals are 95 % over queries (bootstrap).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwflow.diagnose.heldout import LEAST, MOST, Problem
from nwflow.diagnose.measure import OWN_PATH, PATCHES, Measured
from nwflow.diagnose.result import Interval, Regime, Remedy, Verdict

HEALTHY, GAIN, BORROWED, CHANCE = 0.1, 0.02, 0.05, 0.5
MUCH = 0.2  # share of the plug-in's error that a remedy removes: then something is to be repaired, whatever the gauges
FEW = 3.0
COMPARISON = ("silverman", "scott")  # rules of thumb: measured, never chosen
_DRAWS = 300


def interval(draws: Tensor) -> Interval | None:
    """(value, low, high) of the first entry and the 95 % quantiles of the others; None without a number."""
    value, rest = float(draws[0]), draws[1:][torch.isfinite(draws[1:])]
    if not math.isfinite(value):
        return None
    if not len(rest):
        return value, value, value
    low, high = torch.quantile(rest, torch.tensor([0.025, 0.975], dtype=rest.dtype)).tolist()
    return value, min(value, low), max(value, high)


@dataclass
class Gauges:
    """Errors averaged over bootstrap draws of queries: ``mean[name]`` ``(1 + draws, T)``, the first of all queries."""

    mean: dict[str, Tensor]
    n_eff: Tensor
    window: Tensor
    few: float

    @classmethod
    def of(cls, problem: Problem, measured: Measured, unit: int) -> Gauges:
        done = torch.isfinite(measured.errors["plug-in"][unit]).all(0)
        for name, values in measured.errors.items():
            if not name.startswith(PATCHES):
                done = done & torch.isfinite(values[unit]).all(0)
        q = int(done.sum())
        generator = torch.Generator().manual_seed(problem.seed + 1)
        picks = torch.randint(q, (_DRAWS, q), generator=generator) if q else torch.zeros(0, 0, dtype=torch.long)
        counts = torch.ones(1 + len(picks), q, dtype=torch.float64)
        counts[1:] = torch.stack([torch.bincount(p, minlength=q) for p in picks]) if q else counts[1:]
        weights = counts / max(1, q)
        mean = {k: _mean(weights, v[unit][:, done]) for k, v in measured.errors.items()}
        sizes = [int(problem.equal[f.refs].unique().numel()) for f in problem.folds]
        few = min(FEW, (1.0 + (sum(sizes) / max(1, len(sizes)))) / 2.0)
        return cls(mean, weights @ measured.n_eff[:, done].mT, problem.window[unit], few)

    def own_window(self, name: str) -> Tensor:
        """The window of a path: where its linear denoiser leaves LEAST to MOST of the variance."""
        if not name.startswith(OWN_PATH):
            return self.window
        left = self.mean[name + " linear"][0]
        left = left / left.max()
        return (left > LEAST) & (left < MOST)

    def skill(self, name: str) -> Tensor:
        """Mean over the window of 1 - error / linear error, ``(1 + draws,)``."""
        window = self.own_window(name)
        if not bool(window.any()):
            return self.mean[name].new_full((len(self.mean[name]),), math.nan)
        return (1.0 - self.mean[name] / self.base(name))[:, window].mean(-1)

    def base(self, name: str) -> Tensor:
        """The linear denoiser's errors on the same path for the same queries."""
        return self.mean.get(name + " linear", self.mean["linear"])

    def same_path(self) -> list[str]:
        away = (OWN_PATH, PATCHES)
        return [k for k in self.mean if not k.startswith(away) and k not in ("plug-in", *COMPARISON)]

    def remedies(self) -> list[str]:
        names = [k for k in self.mean if not k.endswith("linear") and k not in ("plug-in", *COMPARISON)]
        return [k for k in names if not k.startswith(OWN_PATH) or self.comparable(k)]

    def comparable(self, name: str) -> bool:
        """Whether a metric's own linear denoiser is one to compare with: fitted to two or three points it errs without
        bound, and any skill against it means nothing."""
        own, plain = self.mean[name + " linear"][0], self.mean["linear"][0]
        return bool(own.max() <= 3.0 * plain.max())

    def best(self) -> str | None:
        """The remedy of most skill, if it removes at least GAIN of the plug-in's error."""
        skills = {k: float(self.skill(k)[0]) for k in self.remedies()}
        skills = {k: v for k, v in skills.items() if math.isfinite(v)}
        if not skills:
            return None
        name = max(skills, key=skills.__getitem__)
        plug = float(self.skill("plug-in")[0])
        return name if 1.0 - skills[name] < (1.0 - GAIN) * (1.0 - plug) else None

    def collapse(self) -> Tensor:
        w, p, i = self.window, self.mean["plug-in"], self.mean["smoothing-isotropic"]
        return _share((p - i).clamp(min=0.0) * (w & (self.n_eff < self.few)), p * w)

    def borrowed(self) -> Tensor | None:
        """What a pool of other classes removes, where it beats all that the references alone can do."""
        if "pool" not in self.mean:
            return None
        w, p, pool = self.window, self.mean["plug-in"], self.mean["pool"]
        alone = torch.stack([(self.mean[k] * w).sum(-1) for k in self.same_path() if k != "pool"]).amin(0)
        if not float(((pool * w).sum(-1) / alone)[0]) < 1.0 - BORROWED:
            return None
        return _share((p - pool).clamp(min=0.0) * w, p * w)

    def geometry(self) -> dict[str, Tensor]:
        """The three terms."""
        w, p, iso = self.window, self.mean["plug-in"], self.mean["smoothing-isotropic"]
        best = torch.stack([self.mean[k] for k in self.same_path()]).amin(0)
        excess = ((p - best) / p - CHANCE / (1.0 + self.n_eff)).masked_fill(~(w & (self.n_eff >= self.few)), 0.0)
        names = [k for k in self.mean if k.startswith("smoothing-") and k != "smoothing-isotropic"] + ["linear"]
        shaped = torch.stack([self.mean[k] for k in names]).amin(0)
        shape = _share((torch.minimum(p, iso) - shaped).clamp(min=0.0) * w, p * w)
        plug = self.skill("plug-in")
        gains = [(self.skill(k) - plug) / (1.0 - plug) for k in self.remedies() if k.startswith(OWN_PATH)]
        metric = torch.stack(gains).nan_to_num(0.0).amax(0).clamp(min=0.0) if gains else torch.zeros_like(plug)
        return {"excess": excess.amax(-1).clamp(min=0.0), "shape": shape, "metric": metric}


def _mean(weights: Tensor, errors: Tensor) -> Tensor:
    """Weighted means ``(draws, T)`` of errors ``(T, Q)`` over the queries that have them."""
    done = torch.isfinite(errors).all(0)
    some = weights[:, done]
    return (some @ errors[:, done].mT) / some.sum(-1, keepdim=True)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return part.sum(-1) / whole.sum(-1)


def regimes(g: Gauges | None, scarcity: Interval | None, few_points: bool) -> dict[str, Regime]:
    """The three gauges with what they mean; ``few_points``: too few references to measure anything."""
    if few_points or g is None:
        nothing = "There are too few references to leave one out: not measured."
        text = "Fewer than three distinct references: no denoiser can know more than that they exist."
        return {
            "collapse": Regime(None, "isotropic smoothing", nothing),
            "geometry": Regime(None, "a shaped covariance or metric", nothing),
            "scarcity": Regime(None, "more references", text),
        }
    terms = g.geometry()
    size = torch.stack(list(terms.values())).amax(0)
    lead = max(terms, key=lambda k: float(terms[k][0]))
    why = {
        "excess": "where several references share the weight, one bandwidth for all still errs more than adapted ones",
        "shape": "a covariance of the data's shape removes more than an isotropic one",
        "metric": "a metric of the data's shape removes more than the Euclidean distance",
    }[lead]
    c, pool = interval(g.collapse()), g.borrowed()
    more = "Share of the best remedy's error that four times as many would remove."
    if pool is not None and (scarcity is None or float(pool[0]) > scarcity[0]):
        scarcity = interval(pool)
        more = "Share of the error that a pool of other classes removes, more than these references alone can."
    return {
        "collapse": Regime(
            c, "isotropic smoothing", "Share of the error that smoothing removes where one reference has the weight."
        ),
        "geometry": Regime(interval(size), "a shaped covariance or metric", f"Largest of three shares; here {why}."),
        "scarcity": Regime(scarcity, "more references", more),
    }


def decide(found: dict[str, Regime], best: str | None, gain: float | None, unit: str, few_points: bool) -> Verdict:
    """The verdict in two sentences; ``gain``: share of the plug-in's error that the best remedy removes."""
    sizes = {k: v.skill_lost[0] for k, v in found.items() if v.skill_lost is not None}
    if few_points:
        return Verdict("scarcity", f"Support scarcity: {found['scarcity'].text} Add references.", None, unit)
    name = max(sizes, key=sizes.__getitem__) if sizes else "healthy"
    if not sizes or (sizes[name] < HEALTHY and (gain or 0.0) < MUCH):
        extra = f"The best remedy, {best}, removes {gain:.0%} of what is left." if best and gain and gain > 0.02 else ""
        rest = extra or "No remedy gains on the exact field."
        return Verdict("healthy", f"Healthy: conditioning on these references works. {rest}", best, unit)
    first = {
        "collapse": "Nearest-neighbour collapse: one reference takes the weight too early, which costs "
        f"{sizes[name]:.0%} of the error.",
        "geometry": "Geometry mismatch: one round kernel of one bandwidth does not fit these data, which costs "
        f"{sizes[name]:.0%} of the error.",
        "scarcity": f"Support scarcity: there are too few references, which costs {sizes[name]:.0%} of the error.",
    }[name]
    second = "No remedy helps." if best is None else f"The remedy that helps most is {best}"
    second += "." if best is None or gain is None else f": it removes {gain:.0%} of the plug-in's error."
    return Verdict(name, f"{first} {second}".replace("No remedy helps..", "No remedy helps."), best, unit)


def remedy_rows(g: Gauges, measured: Measured, texts: dict[str, str]) -> tuple[Remedy, ...]:
    """All remedies, the most skilful first."""
    rows: list[Remedy] = []
    plug = g.skill("plug-in")
    for name in [*g.remedies(), *(k for k in COMPARISON if k in g.mean)]:
        skill = interval(g.skill(name))
        error = interval((1.0 - g.skill(name)) / (1.0 - plug))
        value, low, high = skill if skill is not None else (None, None, None)
        rows.append(
            Remedy(
                name, value, low, high, error, typical(measured.settings.get(name, [])), texts.get(name, ""),
                name.startswith(OWN_PATH),
            )
        )  # fmt: skip
    return tuple(sorted(rows, key=lambda r: -math.inf if r.skill is None else r.skill, reverse=True))


def typical(settings: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians of what the folds fitted."""
    if not settings:
        return {}
    return {
        k: float(torch.tensor([s[k] for s in settings if k in s], dtype=torch.float64).median()) for k in settings[0]
    }
