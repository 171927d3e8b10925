"""Attention layers as sums of kernel smoothers: the sum is the layer, and what is said of each head is true."""

import math

import pytest
import torch
from torch import nn

import nwflow
from nwflow.attention import Projections, decompose, n_eff_over_time, principal_angles, projections

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}  # of the layer's largest output: rounding of its own sums


def randomised(module: nn.Module) -> nn.Module:
    """Every parameter random, biases and norms too: what starts at zero or one would hide a mistake."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module.eval()


def diffusers_attention(**options) -> nn.Module:
    attention = pytest.importorskip("diffusers.models.attention_processor")
    return attention.Attention(**{"query_dim": 16, "cross_attention_dim": 6, "heads": 4, "dim_head": 4} | options)


LAYERS = {
    "multihead": (lambda: nn.MultiheadAttention(16, 4, batch_first=True), 16, None),
    "multihead, length first": (lambda: nn.MultiheadAttention(16, 4), 16, None),
    "multihead, own widths": (lambda: nn.MultiheadAttention(16, 4, kdim=6, vdim=5, batch_first=True), 6, 5),
    "multihead, no bias": (lambda: nn.MultiheadAttention(16, 4, bias=False, batch_first=True), 16, None),
    "multihead, more keys": (
        lambda: nn.MultiheadAttention(16, 4, kdim=6, vdim=5, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        6,
        5,
    ),
    "gaussian": (lambda: nwflow.GaussianAttention(16, 4, kdim=6), 6, None),
    "gaussian with prior": (lambda: nwflow.GaussianAttention(16, 4, kdim=6, prior="key_norm", qk_norm=True), 6, None),
    "diffusers": (lambda: diffusers_attention(), 6, None),
    "diffusers, bias and norms": (lambda: diffusers_attention(bias=True, qk_norm="layer_norm"), 6, None),
    "diffusers, residual": (
        lambda: diffusers_attention(
            norm_num_groups=4, residual_connection=True, rescale_output_factor=1.7, cross_attention_norm="layer_norm"
        ),
        6,
        None,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_smoothers_with_priors_sum_to_the_layer(name: str, masked: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, width, value_width = LAYERS[name]
    module = randomised(make().to(dtype))
    x, y = torch.randn(2, 5, 16, dtype=dtype), torch.randn(2, 7, width, dtype=dtype)
    z = None if value_width is None else torch.randn(2, 7, value_width, dtype=dtype)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3]) if masked else None
    found = decompose(module, x, y, z, mask)
    assert found.error is not None and found.error < TOLERANCE[dtype]
    assert sum(h.share for h in found.heads) == pytest.approx(1.0)
    extra = found.maps.extra
    for h in found.heads:
        assert h.weights.shape == (2, 5, 7 + extra)
        torch.testing.assert_close(h.weights.sum(-1), torch.ones(2, 5, dtype=dtype))
        if masked:
            assert (h.weights[1, :, 4:7] == 0).all()


def test_own_models_attention() -> None:
    layers = pytest.importorskip("nwflow.models.layers")
    config = pytest.importorskip("nwflow.models").ModelConfig
    torch.manual_seed(0)
    for gaussian in (False, True):
        made = layers.Attention(config(dim=2, width=16, heads=4, gaussian_logits=gaussian, qk_norm=True)).double()
        found = decompose(randomised(made), torch.randn(2, 5, 16).double(), torch.randn(2, 7, 16).double())
        assert found.error is not None and found.error < 1e-12
        assert found.kernel == ("gaussian" if gaussian else "dot")


def test_self_attention_and_extreme_norms() -> None:
    """Log priors of hundreds of nats do not underflow: the key that wins need not be the one with the largest prior."""
    torch.manual_seed(1)
    module = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    assert decompose(module, x).error == pytest.approx(0.0, abs=1e-12)
    y = torch.cat([100.0 * x[:, :1], x[:, 1:]], 1)
    assert decompose(module, -x, y).error == pytest.approx(0.0, abs=1e-10)


def test_equal_key_norms_are_the_plain_smoother() -> None:
    d = 4
    eye = torch.eye(d, dtype=torch.float64)[None]
    maps = Projections(eye, eye, eye, eye, torch.tensor([d**-0.5], dtype=torch.float64))
    y = torch.eye(d, dtype=torch.float64)[None]
    x = torch.randn(1, 5, d, dtype=torch.float64)
    found = decompose(maps, x, y)
    field_weights = nwflow.nw_weights(x, y, bandwidth=d**0.25)
    torch.testing.assert_close(found.heads[0].weights, field_weights, rtol=0, atol=1e-14)
    assert float(found.heads[0].total_variation.max()) < 1e-14 and found.heads[0].prior_spread < 1e-14
    assert found.heads[0].bandwidth == pytest.approx(math.sqrt(2.0)) and found.error is None


def test_subspaces_and_their_angles() -> None:
    """A head that sees the plane in which the data vary is aligned, one that sees its complement is not."""
    torch.manual_seed(2)
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    y = torch.randn(1, 50, 2, dtype=torch.float64) @ basis[:, :2].mT * 3.0
    weight = torch.stack([basis[:, :2].mT, basis[:, 2:4].mT])  # two heads of width 2
    out = torch.ones(2, 3, 2, dtype=torch.float64)
    maps = Projections(weight, weight, weight, out, torch.full((2,), 2**-0.5, dtype=torch.float64))
    first, second = decompose(maps, y[:, :5], y).heads
    assert first.alignment == pytest.approx(1.0) and second.alignment == pytest.approx(0.0, abs=1e-12)
    assert first.rank == 2 and first.share == pytest.approx(1.0)
    rotation = torch.tensor([[math.cos(1e-9), math.sin(1e-9)], [0.0, 0.0]], dtype=torch.float64).mT[:, :1]
    small = principal_angles(torch.eye(2, dtype=torch.float64)[:, :1], rotation)
    assert float(small) == pytest.approx(1e-9, rel=1e-6), "a cosine alone would lose an angle of 1e-9"


def test_n_eff_along_the_flow_is_that_of_the_heads() -> None:
    torch.manual_seed(3)
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    s = torch.randn(1, 6, 8)
    found = {t: decompose(module, t * s[:, :4], s) for t in (0.9, 0.1)}
    along = n_eff_over_time(found)
    assert along["t"].tolist() == [0.1, 0.9]
    for i, t in enumerate((0.1, 0.9)):
        for h in found[t].heads:
            assert float(along["n_eff"][i, h.head]) == pytest.approx(
                float(h.weights.square().sum(-1).reciprocal().mean())
            )


def test_refusals_name_what_they_met() -> None:
    with pytest.raises(TypeError, match="Linear"):
        projections(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="add_k_proj"):
        projections(diffusers_attention(added_kv_proj_dim=5))
    with pytest.raises(TypeError, match="training"):
        decompose(nn.MultiheadAttention(8, 2, dropout=0.5), torch.randn(1, 2, 8))
    with pytest.raises(ValueError, match="mask"):
        decompose(nn.MultiheadAttention(8, 2), torch.randn(1, 2, 8), mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="values"):
        decompose(diffusers_attention(), torch.randn(1, 2, 16), torch.randn(1, 3, 6), torch.randn(1, 3, 6))
