"""Certified truncation against float64 and wider: nothing that is left out weighs more than the bound says."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nwflow.kernel import prune
from nwflow.kernel.posterior import Keys, Want, finish, prepare, stream
from nwflow.kernel.prune import Anchor, Truncated, anchored, leading, truncated
from nwflow.kernel.rescore import posterior

F64 = torch.float64


@dataclass
class Problem:
    """A support as the engine has it, queries of a path with a bandwidth, and anchors of many kinds."""

    keys: Keys
    y: Tensor
    b: Tensor
    anchor: Anchor | None
    widths: tuple[int, ...]

    def solve(self, tol: float, accuracy: float = 1e-9, **given) -> Truncated:
        want = Want(top=self.keys.m, square=True, mass2=True)
        leads = leading(self.keys, self.widths)
        return truncated(self.y, self.b, self.keys, leads, want, tol, accuracy, anchor=self.anchor, **given)

    def logits(self) -> Tensor:
        """In extended precision, as far as the weights need it."""
        z = self.keys.exact(0, self.keys.m).numpy().astype(np.longdouble)
        y, b = (v.numpy().astype(np.longdouble) for v in (self.y, self.b))
        lg = y @ z.T - 0.5 * b * (z * z).sum(1) + self.keys.log_prior.numpy()
        return torch.from_numpy((lg - lg.max(1, keepdims=True)).astype(np.float64))


def points(kind: str, m: int, d: int, g: torch.Generator) -> Tensor:
    s = torch.randn(m, d, generator=g, dtype=F64)
    if kind == "duplicates":
        s = s[torch.randint(max(1, m // 3), (m,), generator=g)]
    elif kind == "flat":  # rank one
        s = s[:, :1] * torch.randn(d, generator=g, dtype=F64)
    elif kind == "equal":
        s = s[:1].expand(m, d).clone()
    elif kind == "clusters":
        s = 1e-3 * s + 3.0 * torch.randn(4, d, generator=g, dtype=F64)[torch.randint(4, (m,), generator=g)]
    elif kind == "tailed":
        s = s * torch.exp(2.0 * torch.randn(m, 1, generator=g, dtype=F64))
    return s.float()


def parameters(keys: Keys, r: float, noise: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """y and b at bandwidth 1 / r (in units of the data's scale) for states at points ``of`` with ``noise``."""
    scale = float(keys.square.mean().sqrt()) / math.sqrt(noise.shape[1])
    r = r / scale if scale > 1e-9 else r  # equal points have no scale
    y = r * (r * keys.gather(of) + noise)
    return y, torch.full((len(y), 1), r * r, dtype=F64)


KINDS = ("cloud", "duplicates", "flat", "equal", "clusters", "tailed")
ANCHORS = ("none", "same", "near", "mixed", "unrelated", "zero", "opposite")


def problem(kind: str, anchor: str, m: int, d: int, r: float, ratio: float, prior: float, scale: float, seed: int,
            widths: tuple[int, ...] = (2, 5)) -> Problem:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    s = scale * points(kind, m, d, g)
    log_prior = (prior * torch.randn(m, generator=g, dtype=F64)).log_softmax(0)
    centre = (log_prior.exp() @ s.double())[None]
    keys = prepare(s, centre, torch.ones(1, 1, dtype=F64), log_prior, torch.float32)
    n = 5
    noise, of, other = torch.randn(n, d, generator=g, dtype=F64), *torch.randint(m, (2, n), generator=g)
    y, b = parameters(keys, r, noise, of)
    earlier, its = {
        "same": lambda: (y, b),
        "near": lambda: parameters(keys, r / ratio, noise, of),
        "mixed": lambda: parameters(keys, r / ratio, noise, other),
        "unrelated": lambda: parameters(keys, r / ratio, torch.randn(n, d, generator=g, dtype=F64), other),
        "zero": lambda: (0.0 * y, 0.0 * b),
        "opposite": lambda: (-y, b),
    }.get(anchor, lambda: (y, b))()
    return Problem(keys, y, b, None if anchor == "none" else anchored(earlier, its, keys), widths)


problems = st.builds(
    problem,
    kind=st.sampled_from(KINDS),
    anchor=st.sampled_from(ANCHORS),
    m=st.sampled_from([1, 2, 7, 60, 300]),
    d=st.sampled_from([1, 2, 6, 20]),
    r=st.sampled_from([0.05, 0.5, 2.0, 10.0, 200.0]),
    ratio=st.sampled_from([1.05, 1.5, 4.0]),
    prior=st.sampled_from([0.0, 1.0, 5.0]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 10**6),
    widths=st.sampled_from([(1,), (2, 5), (4, 8, 16)]),
)


def check(p: Problem, found: Truncated, tol: float) -> None:
    """Everything that a result promises, against all logits."""
    lg = p.logits()[found.rows]
    w = torch.softmax(lg, -1)
    moments = found.moments
    assert moments is not None and moments.index is not None and moments.weights is not None
    kept = torch.zeros_like(w, dtype=torch.bool)
    for i, index in enumerate(moments.index):
        kept[i, index[index >= 0]] = True
    left = w.masked_fill(kept, 0.0).sum(-1)
    assert bool((left <= found.skipped * (1 + 1e-9) + 1e-300).all())
    assert bool((found.skipped <= tol * (1 + 1e-3)).all())
    largest = lg.masked_fill(kept, -math.inf).amax(-1) - lg.gather(1, found.best[:, None])[:, 0]
    norm = p.y[found.rows].norm(dim=-1) * p.keys.radius
    best = (p.y[found.rows] * p.keys.gather(found.best)).sum(-1) - 0.5 * p.b[found.rows, 0] * p.keys.square[found.best]
    best = best + p.keys.log_prior[found.best]
    assert bool((largest <= found.above - best + 1e-9 + 1e-13 * norm).all())
    z = p.keys.exact(0, p.keys.m)
    assert moments.error is not None and moments.mean is not None
    allowed = 2.0 * (moments.error[:, None] + 1e-14) * p.keys.radius  # 1e-14: rounding of the means themselves
    assert bool(((moments.mean - w @ z).norm(dim=-1, keepdim=True) <= allowed * (1 + 1e-9) + 1e-300).all())


@settings(max_examples=400)
@given(problems, st.sampled_from([1e-8, 1e-4, 1e-2, 0.5]))
def test_nothing_left_out_weighs_more_than_its_bound(p, tol):
    found = p.solve(tol)
    assert found.rows.tolist() == list(range(len(p.y)))  # small supports are never given up
    check(p, found, tol)


@settings(max_examples=60)
@given(problems.filter(lambda p: p.keys.m >= 60), st.sampled_from([1e-4, 1e-2]))
def test_queries_that_are_given_up_are_missing_and_the_others_keep_their_bounds(p, tol):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prune, "LOOSE", 4)
        patch.setattr(prune, "SHORT", 12)
        patch.setattr(prune, "BLOCK", 64)
        found = p.solve(tol)
    if found.moments is not None:
        check(p, found, tol)
    assert found.rows.tolist() == sorted(set(found.rows.tolist()))
    assert found.gap.shape == (len(p.y),)


@settings(max_examples=40)
@given(problems, st.sampled_from([1e-4, 1e-2]))
def test_moments_are_those_of_the_dense_pass_within_their_errors(p, tol):
    found = p.solve(tol, accuracy=1e-6)
    whole = posterior(p.y, p.b, p.keys, Want(square=True), 1e-6)
    error = found.moments.error + whole.error
    assert bool(((found.moments.mean - whole.mean).norm(dim=-1) <= 2 * error * p.keys.radius + 1e-300).all())
    assert bool(((found.moments.square - whole.square)[:, 0].abs() <= 2 * error * p.keys.radius**2 + 1e-300).all())
    spare = 1e-6 + 1e-12 * (p.y.norm(dim=-1) * p.keys.radius + p.b[:, 0] * p.keys.radius**2)
    assert bool(((whole.lse - found.moments.lse) <= -torch.log1p(-found.skipped.clamp(max=0.99)) + spare).all())


@pytest.mark.parametrize("anchor", ["none", "near"])
def test_results_do_not_depend_on_who_else_is_asked_beyond_the_bounds(anchor):
    p = problem("cloud", anchor, 300, 20, 2.0, 1.3, 1.0, 1.0, 0)
    whole = p.solve(1e-4)
    for i in range(len(p.y)):
        near = None if p.anchor is None else p.anchor.take(slice(i, i + 1))
        alone = Problem(p.keys, p.y[i : i + 1], p.b[i : i + 1], near, p.widths).solve(1e-4)
        allowed = 2.0 * (alone.moments.error[0] + whole.moments.error[i]) * p.keys.radius
        assert (alone.moments.mean[0] - whole.moments.mean[i]).norm() <= allowed


def test_blocks_of_queries_change_nothing(monkeypatch):
    p = problem("clusters", "near", 300, 20, 2.0, 1.3, 1.0, 1.0, 0)
    whole = p.solve(1e-4)
    monkeypatch.setattr(prune, "QUERY_BLOCK", 2)
    parts = p.solve(1e-4)
    assert parts.rows.tolist() == whole.rows.tolist() and torch.equal(parts.best, whole.best)
    error = 2.0 * (whole.moments.error + parts.moments.error) * p.keys.radius
    assert bool(((whole.moments.mean - parts.moments.mean).norm(dim=-1) <= error).all())


def test_long_lists_are_scored_as_one_support_or_one_by_one(monkeypatch):
    p = problem("cloud", "near", 300, 20, 0.5, 1.3, 0.0, 1.0, 0)
    one = p.solve(1e-4)
    assert one.scored == len(p.y) * 300  # their union is everything
    monkeypatch.setattr("nwflow.kernel.candidates.OVERLAP", 10**6)
    each = p.solve(1e-4)
    assert each.scored < one.scored
    check(p, one, 1e-4)
    check(p, each, 1e-4)


def test_leading_coordinates_and_rests_bound_every_product(randn):
    s = randn(500, 30) @ randn(30, 30)
    keys = prepare(s, s.mean(0, keepdim=True), torch.ones(1, 1, dtype=F64), torch.zeros(500, dtype=F64), torch.float32)
    leads = leading(keys, (3, 8, 20))
    basis, z = leads.basis, keys.exact(0, 500)
    assert (basis.mT @ basis - torch.eye(20, dtype=F64)).abs().max() < 1e-13
    assert ((leads.lead.double() - z @ basis).norm(dim=-1) <= leads.slip * z.norm(dim=-1)).all()
    for k, block in zip(leads.widths, leads.blocks):
        rest = (z - z @ basis[:, :k] @ basis[:, :k].mT).norm(dim=-1)
        assert bool((rest <= block[:, -1].double()).all())
        assert bool((block[:, -1].double() <= rest + 0.03 * z.norm(dim=-1)).all())


def test_kept_logits_are_within_their_error(randn):
    p = problem("tailed", "none", 300, 20, 10.0, 1.0, 1.0, 1.0, 3)
    kept = anchored(p.y, p.b, p.keys)
    z = p.keys.exact(0, 300)
    exact = p.y @ z.mT - 0.5 * p.b * p.keys.square + p.keys.log_prior
    assert bool(((kept.logits.double() - exact).abs() <= kept.error[:, None]).all())
    assert torch.equal(kept.best, kept.logits.argmax(-1))


def test_an_anchor_makes_the_bounds_tight_where_noise_is_most_of_a_state():
    """Along a flow the remainder is made of data; without an anchor it is made of noise, and nothing can be dropped."""
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(400, 400, generator=g, dtype=F64)).Q
    s = (torch.randn(2000, 400, generator=g, dtype=F64) * torch.arange(1.0, 401.0, dtype=F64) ** -0.8) @ basis
    keys = prepare(s.float(), s.float().double().mean(0, keepdim=True), torch.ones(1, 1, dtype=F64),
                   torch.full((2000,), -math.log(2000), dtype=F64), torch.float32)  # fmt: skip
    noise, of = torch.randn(8, 400, generator=g, dtype=F64), torch.randint(2000, (8,), generator=g)
    earlier = parameters(keys, 1.0, noise, of)
    y, b = parameters(keys, 1.3, noise, of)
    leads, want = leading(keys, (16,)), Want()
    bare = truncated(y, b, keys, leads, want, 1e-4, 1e-6)
    near = truncated(y, b, keys, leads, want, 1e-4, 1e-6, anchored(*earlier, keys))
    whole = finish(stream(y, b, keys, want, F64, F64))
    assert near.rows.numel() == 8 and near.loose < 0.1 * bare.loose
    assert (near.moments.mean - whole.mean).norm(dim=-1).max() <= 1e-4 * float(keys.radius)


def test_what_is_no_number_is_left_to_the_dense_pass():
    p = problem("cloud", "none", 60, 6, 2.0, 1.0, 0.0, 1.0, 0)
    p.y[1] = math.nan
    p.y[3] = math.inf
    p.y[4] = 1e300
    found = p.solve(1e-4)
    assert found.rows.tolist() == [0, 2]
    p.y, p.b = p.y[found.rows], p.b[found.rows]
    check(p, found._replace(rows=torch.arange(2)), 1e-4)
