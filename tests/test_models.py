"""In-context networks: invariances, exact limits, masks, export, and the field that a network gives a support."""

import itertools

import pytest
import torch
from torch import Tensor

from nwflow import Cosine, NWField, Support, VarianceExploding, sample
from nwflow.models import ICFM, ICFMField, ModelConfig
from nwflow.models.heads import denoise_exactly
from nwflow.models.schedule import centred, times
from nwflow.paths import CondOT

CONFIGS = {
    "preconditioned": ModelConfig(dim=2, width=16, heads=2),
    "preconditioned-all": ModelConfig(dim=2, width=16, heads=2, self_layers=1, qk_norm=True, gaussian_logits=True),
    "preconditioned-bare": ModelConfig(dim=2, width=16, heads=2, smoothers=0),
    "paper": ModelConfig(dim=2, preset="paper", width=16, heads=2, sigma_min=0.01),
    "paper-exact": ModelConfig(dim=2, preset="paper", width=16, heads=2, exact_head="input", qk_norm=True),
}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
ours = pytest.mark.parametrize("config", [c for c in CONFIGS.values() if c.preset == "preconditioned"])


def built(config: ModelConfig, dtype: torch.dtype = torch.float64) -> ICFM:
    """A network with an output layer that is not zero."""
    model = ICFM(config, torch.Generator().manual_seed(0)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator, dtype=dtype))
    return model


def task(randn, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Supports (3, 7, 2), queries (3, 5, 2) and times (3, 5)."""
    support, x = 3.0 * randn(3, 7, 2) + 1.0, 2.0 * randn(3, 5, 2)
    return support.to(dtype), x.to(dtype), torch.linspace(0.02, 0.98, 15, dtype=torch.float64).view(3, 5)


@each
def test_order_of_the_support_does_not_matter(config, randn):
    model, (support, x, t) = built(config), task(randn)
    moved = support[:, torch.tensor([3, 1, 6, 0, 2, 5, 4])]
    torch.testing.assert_close(model(x, t, moved), model(x, t, support), rtol=1e-9, atol=1e-9)


@each
def test_a_query_is_answered_alone(config, randn):
    model, (support, x, t) = built(config), task(randn)
    alone = torch.cat([model(x[i : i + 1, j : j + 1], t[i : i + 1, j : j + 1], support[i : i + 1])
                       for i, j in itertools.product(range(3), range(5))])  # fmt: skip
    torch.testing.assert_close(alone.view(3, 5, 2), model(x, t, support), rtol=1e-9, atol=1e-9)


@each
@pytest.mark.parametrize("junk", [float("nan"), 1e30, float("-inf")])
def test_padding_does_not_matter_whatever_it_holds(config, junk, randn):
    model, (support, x, t) = built(config), task(randn)
    padded = torch.cat([torch.full((3, 2, 2), junk), support, torch.full((3, 1, 2), junk)], 1).requires_grad_()
    mask = torch.tensor([False] * 2 + [True] * 7 + [False]).expand(3, -1)
    out = model(x, t, padded, mask)
    torch.testing.assert_close(out, model(x, t, support), rtol=1e-9, atol=1e-9)
    out.square().sum().backward()
    assert padded.grad is not None and bool((padded.grad[:, [0, 1, -1]] == 0).all())
    assert bool(torch.isfinite(padded.grad).all())


@each
def test_sizes_of_tasks_are_their_own(config, randn):
    model, (support, x, t) = built(config), task(randn)
    mask = torch.arange(7) < torch.tensor([[1], [4], [7]])
    out = model(x, t, support, mask)
    for i, m in enumerate((1, 4, 7)):
        one = model(x[i : i + 1], t[i : i + 1], support[i : i + 1, :m])
        torch.testing.assert_close(out[i : i + 1], one, rtol=1e-9, atol=1e-9)


@each
def test_a_task_without_a_point_is_named(config):
    model, mask = built(config, torch.float32), torch.arange(3) < torch.tensor([[2], [0], [3]])
    with pytest.raises(ValueError, match="batch index 1"):
        model(torch.zeros(3, 1, 2), 0.5, torch.zeros(3, 3, 2), mask)
    with pytest.raises(ValueError, match="mask: expected booleans"):
        model(torch.zeros(3, 1, 2), 0.5, torch.zeros(3, 3, 2), mask[:2])


@ours
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shift_and_scale_of_the_support_come_out_again(config, dtype, randn):
    model, (support, x, t) = built(config, dtype), task(randn)
    at = times(model.path, t, x)
    for factor, shift in ((7.0, 0.0), (1.0, 30.0), (1e-3, -2.0), (1e4, 1e4)):
        # x_t = alpha x1 + sigma x0: the noise keeps its size, so alpha and sigma are those of a rescaled time
        h = at.sigma / at.alpha * factor
        later = (1 / (1 + h)).squeeze(-1)
        moved = support * factor + shift
        units = times(model.path, later, x)
        query = units.alpha * (x / at.alpha * factor + shift)
        there = (model.denoise(query.to(dtype), later, moved.to(dtype)).double() - shift) / factor
        here = model.denoise(x.to(dtype), t, support.to(dtype)).double()
        torch.testing.assert_close(there, here, rtol=0, atol=1e-5 if dtype == torch.float64 else 1e-2)


@ours
def test_without_a_network_it_is_the_linear_denoiser(config, randn):
    model, (support, x, t) = ICFM(config, torch.Generator().manual_seed(0)), task(randn)
    at = times(model.path, t, x)
    mean = support.mean(1, keepdim=True)
    s2 = (support - mean).square().mean(-1).sum(1)[:, None, None] / 6
    wiener = mean + at.alpha * s2 / (at.alpha**2 * s2 + at.sigma**2) * (x - at.alpha * mean)
    torch.testing.assert_close(model.denoise(x, t, support), wiener, rtol=1e-12, atol=1e-12)


@ours
def test_the_loss_is_that_of_the_denoiser_in_units_of_its_scale(config, randn):
    model, (support, x1, t) = built(config), task(randn)
    x0, at = randn(3, 5, 2), times(model.path, t, x1)
    variance = support.var(1).mean(-1)[:, None, None]
    out = at.sigma**2 * variance / (at.alpha**2 * variance + at.sigma**2)
    error = model.denoise(at.alpha * x1 + at.sigma * x0, t, support) - x1
    wanted = (error.square() / out).mean(-1)
    torch.testing.assert_close(model.loss(x0, x1, t, support), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.loss(x0, x1, t, support, target=x1), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["paper", "paper-exact"])
def test_the_loss_of_the_paper_is_that_of_the_velocity(name, randn):
    model, (support, x1, t) = built(CONFIGS[name]), task(randn)
    x0, at = randn(3, 5, 2), times(model.path, t, x1)
    error = model(at.alpha * x1 + at.sigma * x0, t, support) - (at.d_alpha * x1 + at.d_sigma * x0)
    wanted = error.square().mean(-1)
    torch.testing.assert_close(model.loss(x0, x1, t, support), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.loss(x0, x1, t, support, target=x1), wanted, rtol=1e-9, atol=1e-9)


@each
def test_gradients_are_finite_and_reach_every_parameter(config, randn):
    model, (support, x1, _) = built(config), task(randn)
    t = torch.tensor([[1e-6, 0.3, 0.9, 0.999, 1 - 1e-9]], dtype=torch.float64)
    model.loss(randn(3, 5, 2), x1, t, support).mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and bool(torch.isfinite(p.grad).all()) and bool((p.grad != 0).any()), name


@each
@pytest.mark.parametrize("points", [[[2.0, -1.0]], [[2.0, -1.0]] * 5])
def test_a_support_without_scale_is_finite_and_ends_at_its_point(config, points, randn):
    model, support = built(config, torch.float32), torch.tensor([points], requires_grad=True)
    x = randn(1, 6, 2, dtype=torch.float32)
    t = torch.tensor([[0.0, 0.1, 0.5, 0.9, 0.999, 1.0]])
    out = model.denoise(x, t, support)
    out.sum().backward()
    assert bool(torch.isfinite(out).all()) and support.grad is not None and bool(torch.isfinite(support.grad).all())
    if config.preset == "preconditioned":
        torch.testing.assert_close(model.denoise(x, 1.0, support), x)  # sigma = 0: x is the data


@pytest.mark.parametrize("path", [CondOT(), Cosine(), VarianceExploding()])
def test_the_frozen_head_is_the_exact_field(path, randn):
    support, x, t = task(randn)
    mask = torch.arange(7) < torch.tensor([[1], [4], [7]])
    at = times(path, t, x)
    mean, z = centred(torch.where(mask[..., None], support, 0.0), mask)
    exact = NWField(Support.batch(support, mask=mask), path)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        found = mean + denoise_exactly(x - at.alpha * mean, z, mask, at, dtype)
        torch.testing.assert_close(found.double(), exact.denoise(x, t), rtol=0, atol=tolerance)


def test_masked_slots_with_nan_and_huge_values_golden():
    points = torch.tensor([[[-1.0], [1.0], [float("nan")], [1e30]]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False, False]])
    clean, z = centred(torch.where(mask[..., None], points, 0.0), mask)
    x = torch.full((1, 1, 1), 0.5, dtype=torch.float64)
    found = clean + denoise_exactly(x, z, mask, times(CondOT(), 0.5, x), torch.float64)
    assert found.item() == pytest.approx(0.7615941560, abs=1e-10)


@each
def test_a_network_on_a_support_is_a_field(config, randn):
    model, (support, x, t) = built(config), task(randn)
    mask = torch.arange(7) < torch.tensor([[1], [4], [7]])
    tasks = ICFMField(model, Support.batch(support, mask=mask))
    torch.testing.assert_close(tasks(x, t), model(x, t, support, mask), rtol=1e-9, atol=1e-9)
    one = ICFMField(model, support[2])
    torch.testing.assert_close(one(x[2], t[2]), tasks(x, t)[2], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one(x[2, 0], 0.3), tasks(x, 0.3)[2, 0], rtol=1e-9, atol=1e-9)
    at = times(model.path, t, x)
    denoised, noise = tasks.denoise(x, t), tasks.noise(x, t)
    torch.testing.assert_close(at.alpha * denoised + at.sigma * noise, x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(at.d_alpha * denoised + at.d_sigma * noise, tasks.velocity(x, t), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(-noise / at.sigma, tasks.score(x, t), rtol=1e-9, atol=1e-9)


@each
def test_blocks_of_queries_and_what_is_kept_of_a_support_change_nothing(config, randn, monkeypatch):
    model, (support, x, _) = built(config), task(randn)
    field = ICFMField(model, Support.batch(support))
    with torch.no_grad():
        first = field(x, 0.4)
        monkeypatch.setattr("nwflow.models.field.PAIRS", 1)
        torch.testing.assert_close(field(x, 0.4), first, rtol=1e-9, atol=1e-9)
        for p in model.parameters():
            p.mul_(1.1)
        torch.testing.assert_close(field(x, 0.4), model(x, 0.4, support), rtol=1e-9, atol=1e-9)
        assert not torch.allclose(field(x, 0.4), first)


@each
def test_samples_of_a_wiener_field_have_the_moments_of_the_support(config, randn):
    support = 2.0 * randn(20, 2) + 5.0
    model = ICFM(config, torch.Generator().manual_seed(0))
    points = sample(ICFMField(model, support), 300, steps=20, grid="uniform").points
    assert points.dtype == torch.float64 and points.shape == (300, 2)
    if config.preset == "preconditioned":
        torch.testing.assert_close(points.mean(0), support.mean(0), rtol=0, atol=0.5)
        torch.testing.assert_close(points.var(0).mean().sqrt(), support.var(0).mean().sqrt(), rtol=0.1, atol=0)


@each
def test_half_precision_is_computed_in_single(config, randn):
    model, (support, x, _) = built(config, torch.float32), task(randn)
    low, points = x.bfloat16(), support.bfloat16()
    out = model(low, 0.5, points)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, model(low.float(), 0.5, points.float()).bfloat16(), rtol=0, atol=0)


@each
@pytest.mark.parametrize("masked", [False, True])
def test_export_with_any_number_of_queries_and_references(config, masked, randn):
    model, (support, x, t) = built(config, torch.float32).eval(), task(randn, torch.float32)
    mask = torch.arange(7) < torch.tensor([[1], [4], [7]])
    args = (x, t.float(), support, mask) if masked else (x, t.float(), support)
    n, m = torch.export.Dim("n", min=2, max=10000), torch.export.Dim("m", min=2, max=10000)
    shapes = ({1: n}, {1: n}, {1: m}, {1: m})[: len(args)]
    program = torch.export.export(model, args, dynamic_shapes=shapes).module()
    more = [a.repeat_interleave(3, 1) if i > 1 else torch.cat([a, a.flip(1)], 1) for i, a in enumerate(args)]
    torch.testing.assert_close(program(*more), model(*more), rtol=1e-4, atol=1e-4)


@each
def test_state_and_config_make_the_same_network(config, randn):
    model, (support, x, t) = built(config), task(randn)
    other = ICFM(ModelConfig.from_json(config.to_json())).double()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x, t, support), model(x, t, support))


@each
def test_the_generator_decides_the_start(config):
    a, b, c = (ICFM(config, torch.Generator().manual_seed(i)).state_dict() for i in (0, 0, 1))
    assert all(torch.equal(a[k], b[k]) for k in a) and not all(torch.equal(a[k], c[k]) for k in a)


def test_events_of_any_shape(randn):
    model = built(ModelConfig(dim=4, width=16, heads=2))
    x, support = randn(2, 3, 2, 2), randn(2, 6, 2, 2)
    out = model(x, 0.5, support)
    torch.testing.assert_close(out.flatten(2), model(x.flatten(2), 0.5, support.flatten(2)))
    torch.testing.assert_close(ICFMField(model, Support.batch(support))(x, 0.5), out)
    line = built(ModelConfig(dim=1, width=16, heads=2))
    torch.testing.assert_close(
        line(x[..., 0, 0], 0.5, support[..., 0, 0]), line(x[..., :1, 0], 0.5, support[..., :1, 0])[..., 0]
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "best"}, "preset: expected one of"),
        ({"width": 10, "heads": 4}, "width: expected a multiple"),
        ({"scale": 0.0}, "scale: expected a positive"),
        ({"exact_head": "input"}, "exact_head"),
        ({"layers": 0}, "layers: expected an integer"),
        ({"path": "cosine", "sigma_min": 0.1}, "sigma_min: expected 0"),
    ],
)
def test_settings_that_do_not_fit_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(dim=2, **values)


def test_arguments_that_do_not_fit_are_named(randn):
    model = built(CONFIGS["preconditioned"])
    support, x = randn(2, 4, 2), randn(2, 3, 2)
    for call, message in (
        (lambda: model(x[:1], 0.5, support), "x: expected .T, n"),
        (lambda: model(x, torch.rand(2), support), "t: expected"),
        (lambda: model(x, 1.5, support), "t: expected times in"),
        (lambda: model(x, 0.5, support[..., :1]), "support: expected"),
        (lambda: ICFMField(model, support[0, :, :1]), "support: expected events of 2"),
        (lambda: ICFMField(model, Support(support[0], weights=[1, 2, 1, 1])), "equal prior weights"),
        (lambda: ICFMField(built(CONFIGS["paper"]), support[0], Cosine()), "path: expected"),
        (lambda: ICFMField(model, support[0]).score(x[0], 1.0), "t: the score does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
