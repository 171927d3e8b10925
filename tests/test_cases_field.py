"""Small inputs that users of neighbouring tools stumbled over, with values by hand (straight path unless said).

l_i = -|x - t s_i|^2 / (2 (1 - t)^2),  D = sum w_i s_i,  u = (D - x) / (1 - t),  score = (t D - x) / (1 - t)^2
"""

import math

import pytest
import torch
from torch import Tensor

from nwflow import Support
from nwflow.field import NWField
from nwflow.kernel import posterior as engine
from nwflow.paths import CondOT, VarianceExploding, reverse_time
from oracle import Watch

F64 = torch.float64
PAIR = torch.tensor([[-1.0], [1.0]], dtype=F64)  # the 1-D base case: x = 0.5 at t = 0.5
X = torch.tensor([[0.5]], dtype=F64)


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64)


def close(value, expected, tol=1e-9):
    expected = torch.as_tensor(expected, dtype=F64)
    torch.testing.assert_close(value.detach().double(), expected.expand_as(value), rtol=tol, atol=tol)


def at_logits(*logits: float, prior=None, dtype=F64) -> tuple[NWField, Tensor, float]:
    """A 1-D field, query and time whose logits are ``logits`` (differences of non-positive numbers)."""
    t = 0.5  # l = -(x - s/2)^2 / 0.5 and x = 0: s = sqrt(-2 l)
    points = torch.tensor([[math.sqrt(-2.0 * v)] for v in logits], dtype=F64).to(dtype)
    return NWField(Support(points, prior)), torch.zeros(1, 1, dtype=dtype), t


# --- the base case and its relatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-9), (torch.float32, 1e-5)])
def test_two_references_in_one_dimension(dtype, tol):
    field, x = NWField(PAIR.to(dtype)), X.to(dtype)
    close(field.weights(x, 0.5)[0], values(0.1192029220, 0.8807970780), tol)
    close(field.denoise(x, 0.5), math.tanh(1.0), tol)
    close(field(x, 0.5), 0.5231883119, tol)
    close(field.score(x, 0.5), -0.4768116881, tol)
    close(field.n_eff(x, 0.5), 1.2658022288, tol)
    close(field.log_density(x, 0.5), -0.7920105222, tol)


def test_jacobians_of_the_base_case():
    """dD/dx = t / (1 - t)^2 Var_w = 0.8399486832 and du/dx = -0.3201026335."""
    field = NWField(PAIR)
    close(torch.func.jacrev(lambda q: field.denoise(q, 0.5))(X[0]), 0.8399486832)
    close(torch.func.jacrev(lambda q: field(q, 0.5))(X[0]), -0.3201026335)
    close(field.divergence(X, 0.5), -0.3201026335)


def test_several_references_are_kept_apart_never_averaged():
    close(NWField(PAIR).denoise(X, 0.5), 0.7615941560)
    averaged = NWField(PAIR.mean(0, keepdim=True))
    close(averaged.denoise(X, 0.5), 0.0)
    close(averaged(X, 0.5), -1.0)


def test_every_reference_counts():
    """Leaving one of the two out moves D by 1.7615941560 or 0.2384058440."""
    full = NWField(PAIR).denoise(X, 0.5)
    close(full - NWField(PAIR[:1]).denoise(X, 0.5), 1.7615941560)
    close(NWField(PAIR[1:]).denoise(X, 0.5) - full, 0.2384058440)


def test_the_other_time_direction():
    """With s = 1 as noise the velocity changes its sign and nothing else does."""
    field = NWField(PAIR)
    close(reverse_time(field)(X, 0.5), -0.5231883119)
    close(reverse_time(field.denoise, "denoiser")(X, 0.5), 0.7615941560)
    close(reverse_time(field)(X, 0.25), -field(X, 0.75))


def test_distances_are_squared_negative_and_summed_over_coordinates():
    """Not exp(-d), not exp(+d^2), not the mean over coordinates."""
    field = NWField(torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=F64))
    w = field.weights(torch.zeros(1, 2, dtype=F64), 0.5)
    close(w[0], values(0.8175744762, 0.1824255238))


def test_orthogonal_references_collapse_as_the_bandwidth_shrinks():
    """n references c e_i and x = t c e_1: w_1 = 1 / (1 + (n - 1) exp(-c^2 (t / (1 - t))^2))."""
    for n, c2, t, w1, n_eff in ((4, 16.0, 0.5, 0.9999996624, 1.0000006752), (4, 1.0, 0.5, 0.4753668864, 3.1474223219),
                                (1000, 768.0, 0.03, 0.0020824221, 998.8285634)):  # fmt: skip
        points = math.sqrt(c2) * torch.eye(n, dtype=F64)
        field, x = NWField(points), t * points[:1]
        close(field.weights(x, t)[0, 0], w1)
        close(field.n_eff(x, t), n_eff, 1e-7)
        for accuracy in (1e-5, None):
            low = NWField(points.float(), accuracy=accuracy)
            close(low.n_eff(x.float(), t), n_eff, 1e-4)
    points = math.sqrt(768.0) * torch.eye(1000, dtype=F64)
    close(NWField(points).n_eff(0.5 * points[:1], 0.5), 1.0)


# --- priors -----------------------------------------------------------------------------------------------------------


def test_effective_numbers_are_those_of_normalised_weights():
    x = torch.zeros(1, 1, dtype=F64)
    close(NWField(Support(PAIR, [2.0, 2.0])).n_eff(x, 0.0), 2.0)  # 1 / sum w^2 of raw weights would be 0.125
    close(NWField(Support(PAIR, values(1.0, math.exp(-1.0)))).n_eff(x, 0.0), 1.6480542737)
    close(NWField(Support(PAIR, [0.0, 1.0])).n_eff(x, 0.0), 1.0)
    with pytest.raises(ValueError, match="every weight is 0"):
        Support(PAIR, [0.0, 0.0])


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_logits_far_below_zero_do_not_underflow(dtype):
    field, x, t = at_logits(-2000.0, -2001.0, dtype=dtype)
    close(field.weights(x, t)[0], values(0.7310585786, 0.2689414214), 1e-9 if dtype == F64 else 2e-4)
    close(field.n_eff(x, t), 1.6480542737, 1e-9 if dtype == F64 else 2e-4)
    field, x, t = at_logits(-1e5, -1e5 - 50.0)
    w = field.weights(x, t)[0]
    assert float(w[0]) == 1.0 and float(w[1]) == pytest.approx(math.exp(-50.0), rel=1e-9)
    for accuracy in (1e-5, None):
        found = NWField(field.points, accuracy=accuracy).attribute(x, t, k=2)
        assert found.indices[0].tolist() == [0, 1] and float(found.weights[0, 0]) == pytest.approx(1.0)


# --- distances and precision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("accuracy", [1e-5, None])
def test_two_references_far_from_the_origin(accuracy, precision):
    """Both squared distances are 0.0625; x^2 - 2 x s + s^2 in float32 gives 0 and 256."""
    field = NWField(torch.tensor([[100000.0], [100001.0]]), accuracy=accuracy)
    x = torch.tensor([[50000.25]])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        close(field.weights(x, 0.5)[0], values(0.5, 0.5), 1e-6)
        close(field.denoise(x, 0.5), 100000.5, 1e-7)
        close(field.n_eff(x, 0.5), 2.0, 1e-6)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("accuracy", [1e-5, None])
def test_no_squared_distance_is_negative(accuracy):
    """Each point's own squared distance is exactly 0: at tiny bandwidths every point finds itself, and no density
    exceeds that of a query on a point."""
    points = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) + 1000.0
    field = NWField(points, VarianceExploding(1e-3, 10.0), accuracy=accuracy)  # alpha = 1
    close(field.denoise(points, 1.0), points.double(), 1e-7)
    assert (field.attribute(points, 1.0, k=1).indices[:, 0] == torch.arange(64)).all()
    assert (field.n_eff(points, 1.0) >= 1.0 - 1e-6).all()
    largest = -32 * math.log(2 * math.pi * 1e-6) + math.log(1 / 64)
    density = field.log_density(points, 1.0).double()
    assert torch.isfinite(density).all()
    if accuracy is not None:  # the plain float32 pass promises no more than its bound here
        torch.testing.assert_close(density, torch.full((64,), largest, dtype=F64), rtol=1e-6, atol=1e-3)
    assert (field.covariance_trace(points, 0.3) >= 0).all()


def test_gradients_where_a_query_sits_on_a_reference():
    points = torch.tensor([[1.0, 0.0], [3.0, 4.0], [-1.0, 2.0]], dtype=F64, requires_grad=True)
    x = torch.tensor([[0.5, 0.0]], dtype=F64, requires_grad=True)
    t = torch.tensor(0.5, dtype=F64, requires_grad=True)
    for name in ("denoise", "velocity", "score", "log_density", "divergence", "n_eff", "entropy"):
        value = getattr(NWField(points), name)(x, t)
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(value.sum(), (x, points, t)))
    assert torch.autograd.gradcheck(lambda q: NWField(points.detach())(q, 0.5), x)


def test_half_precision_distances_are_computed_wider():
    """d^2 = 76800 and 84672 overflow half precision."""
    points = torch.cat([20 * torch.ones(1, 768), 21 * torch.ones(1, 768)]).half()
    x = torch.zeros(1, 768, dtype=torch.float16)
    for accuracy in (1e-5, None):
        field = NWField(points, accuracy=accuracy)
        close(field.weights(x, 0.5)[0], values(1.0, 0.0))
        assert field.denoise(x, 0.5).dtype == torch.float16
        close(field.denoise(x, 0.5), 20.0)
        assert torch.isfinite(field.log_density(x, 0.5)).all()


def test_unsigned_images_do_not_wrap_round():
    support = Support(torch.tensor([[0], [255]], dtype=torch.uint8))
    assert any("uint8 promoted" in note for note in support.notes)
    close(NWField(support).denoise(torch.tensor([[100.0]]), 0.5), 255.0)  # d^2 = 10000 and 756.25
    with pytest.raises(TypeError, match="x: expected a floating dtype, got torch.uint8"):
        NWField(support).denoise(torch.tensor([[100]], dtype=torch.uint8), 0.5)


# --- both ends of time ------------------------------------------------------------------------------------------------


def test_the_two_ends_of_time():
    field = NWField(torch.tensor([[1.0, 0.0], [3.0, 4.0], [-1.0, 2.0]], dtype=F64))
    x = torch.tensor([[0.3, -2.0]], dtype=F64)
    close(field.weights(x, 0.0)[0], 1 / 3)
    close(field.denoise(x, 0.0)[0], values(1.0, 2.0))
    close(field(x, 0.0)[0], values(0.7, 4.0))
    close(field.score(x, 0.0)[0], values(-0.3, 2.0))
    close(field.n_eff(x, 0.0), 3.0)
    for query, nearest, row in (((0.0, 0.0), (1.0, 0.0), 0), ((3.0, 4.0), (3.0, 4.0), 1)):
        q = torch.tensor([query], dtype=F64)
        close(field.denoise(q, 1.0)[0], values(*nearest), 0.0)
        assert field.weights(q, 1.0)[0].tolist() == [float(i == row) for i in range(3)]
        for name in ("velocity", "score", "noise", "log_density", "divergence"):
            with pytest.raises(ValueError, match="sigma = 0"):
                getattr(field, name)(q, 1.0)


def test_one_and_two_references():
    """Few references need no special case: n_eff is near their number, nothing divides by n - 1."""
    x = torch.tensor([[0.2, -0.1]], dtype=F64)
    one = NWField(torch.tensor([[3.0, 1.0]], dtype=F64))
    close(one.weights(x, 0.1)[0], 1.0)
    close(one.denoise(x, 0.1)[0], values(3.0, 1.0))
    close(one(x, 0.1), (values(3.0, 1.0) - x) / 0.9)
    close(one.n_eff(x, 0.1), 1.0)
    close(one.covariance_trace(x, 0.1), 0.0)
    assert float(NWField(torch.tensor([[0.5, 1.0], [1.0, 0.0]], dtype=F64)).n_eff(x, 0.1)) > 1.98


# --- masks, empty sets, bad rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_padding_may_hold_anything(dtype):
    points = torch.tensor([[-1.0], [1.0], [float("nan")], [1e30]], dtype=dtype)
    mask = torch.tensor([True, True, False, False])
    close(NWField(Support(points, mask=mask)).denoise(X.to(dtype), 0.5), 0.7615941560, 1e-6)
    tasks = NWField(Support.batch(points[None], mask=mask[None]))
    for name, expected in (("denoise", 0.7615941560), ("n_eff", 1.2658022288), ("log_density", -0.7920105222)):
        close(getattr(tasks, name)(X[None].to(dtype), 0.5), expected, 1e-6)
    assert tasks.weights(X[None].to(dtype), 0.5)[0, 0, 2:].tolist() == [0.0, 0.0]


def test_an_empty_set_is_named():
    sets = torch.zeros(3, 3, 1)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    with pytest.raises(ValueError, match="batch index 1"):
        Support.batch(sets, mask=mask)
    with pytest.raises(ValueError, match="batch index 1"):
        Support.batch([torch.zeros(2, 1), torch.zeros(0, 1), torch.zeros(3, 1)])


def test_bad_rows_are_counted_and_named_or_dropped():
    points = torch.tensor([[-1.0], [1.0], [float("nan")]], dtype=F64)
    with pytest.raises(ValueError, match=r"1 bad row .*index 2"):
        NWField(points)
    support = Support(points, drop_nonfinite=True)
    assert support.n_used == 2 and support.n_dropped == 1
    close(NWField(support).denoise(X, 0.5), 0.7615941560)


@pytest.mark.parametrize(("query", "width"), [(1664, 1280), (1024, 1280)])
def test_widths_that_differ_are_both_named(query, width):
    with pytest.raises(ValueError, match=rf"x: expected .*\({width},\).*got \(4, {query}\).*same width"):
        NWField(torch.zeros(10, width))(torch.zeros(4, query), 0.5)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accuracy", [1e-5, None])
@pytest.mark.parametrize("t", [0.3, 0.9, 0.999])
def test_no_tensor_grows_with_queries_times_references(t, accuracy):
    """600 queries on 16,000 references: 38 MB of float32 pairs that are never made; beyond one copy of the points and
    a number or two a reference, what a call makes does not depend on m."""
    g = torch.Generator().manual_seed(0)
    largest = {}
    for m in (8_000, 16_000):
        points = torch.randn(m, 16, generator=g)
        x = t * points[:600] + (1 - t) * torch.randn(600, 16, generator=g)
        field = NWField(points, accuracy=accuracy)
        with Watch() as first:
            field.posterior(x, t, ("velocity", "n_eff", "divergence"))
        assert first.bytes <= 2 * points.untyped_storage().nbytes() + 2**24, m
        with Watch() as again:
            field.posterior(x, t, ("velocity", "n_eff", "divergence"))
            field.attribute(x, t, k=5)
        largest[m] = again.bytes
        assert again.bytes < 600 * m * 4, (m, again.bytes)
    assert largest[16_000] <= largest[8_000] + 8 * 8_000


@pytest.mark.parametrize("block", [1, 7, 4096, 10**9])
def test_block_sizes_do_not_change_results(block):
    """Streamed log-sum-exp, not averaged blocks."""
    g = torch.Generator().manual_seed(0)
    points, x = torch.randn(300, 8, generator=g), torch.randn(20, 8, generator=g)
    shift = points.double().mean(0, keepdim=True)
    lp = torch.full((300,), -math.log(300.0), dtype=F64)
    keys = engine.prepare(points, shift, torch.ones(1, 1, dtype=F64), lp, torch.float32)
    b = torch.full((1, 1), 2.0, dtype=F64)
    y = b * (x.double() - shift)
    want = engine.Want(mass2=True)
    w = torch.softmax(-(x[:, None].double() - points.double()).square().sum(-1), -1)
    found = engine.finish(
        engine.stream(y, b, keys, want, torch.float32, torch.float32, key_block=block, query_block=block)
    )
    close(found.mean + shift, w @ points.double(), 1e-5)
    close(found.n_eff, 1 / w.square().sum(-1), 1e-5)


def test_bandwidths_in_one_pass_of_many_times():
    """A time per query, from the noise end to almost the data end, in one call."""
    points = torch.randn(50, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    t = torch.cat([torch.zeros(1, dtype=F64), 1 - torch.logspace(0, -9, 10, dtype=F64)[1:]])
    x = t[:, None] * points[:10]
    field = NWField(points, CondOT())
    together = field(x, t)
    for i in range(10):
        close(field(x[i], float(t[i])), together[i], 1e-10)
