"""Support: the prior against a float64 oracle and its derivatives, masks, tasks, labels, duplicates, validation."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from nwflow import _pointset
from nwflow.support import Support, SupportSummary

NAN, INF = float("nan"), float("inf")


def denoiser(support: Support, x: float, t: float) -> float:
    """The posterior mean of a 1-D support in float64, by the formula (sigma_t = 1 - t)."""
    s = support.points.double().flatten()
    logits = support.log_weights.double() - (x - t * s) ** 2 / (2 * (1 - t) ** 2)
    return float(torch.softmax(logits, 0) @ s)


# -- prior ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 3e37])
def test_weights_are_normalised_whatever_their_scale(scale):
    raw = torch.tensor([1.0, 2.0, 5.0, 0.0]) * scale
    support = Support(torch.randn(4, 3), raw)
    expected = raw.double() / raw.double().sum()
    torch.testing.assert_close(support.weights.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(support.log_weights.double(), expected.log(), rtol=1e-6, atol=1e-6)
    assert support.log_weights[3] == -INF
    assert support.valid.tolist() == [True, True, True, False]
    assert support.n_used == 3


def test_uniform_prior_counts_real_points_only():
    support = Support(torch.zeros(4, 2), mask=[True, False, True, True])
    torch.testing.assert_close(support.weights, torch.tensor([1, 0, 1, 1]) / 3)
    assert support.weights[1] == 0
    assert support.log_weights[1] == -INF


def test_a_weight_that_underflows_keeps_its_logarithm():
    support = Support(torch.zeros(2, 1), torch.tensor([1e38, 1e-38]))
    assert support.valid.all()
    expected = -float(np.log(np.float32(1e38).astype(float) / np.float32(1e-38)))
    assert float(support.log_weights[1]) == pytest.approx(expected, rel=1e-6)
    raw = torch.tensor([1e38, 1e-38], requires_grad=True)
    (grad,) = torch.autograd.grad(Support(torch.zeros(2, 1), raw).log_weights[1], raw)
    assert float(grad[1]) == pytest.approx(1e38, rel=1e-6)


def test_prior_is_twice_differentiable_beside_masked_and_zero_weights():
    mask = torch.tensor([True, True, False, True, True])
    points = torch.randn(5, 2, dtype=torch.float64)

    def prior(w: Tensor) -> tuple[Tensor, Tensor]:
        support = Support(points, w * torch.tensor([1, 1, 1, 0, 1]), mask=mask)
        return support.weights, torch.where(support.valid, support.log_weights, 0)

    w = torch.tensor([0.3, 1.0, NAN, 0.5, 2.0], dtype=torch.float64).nan_to_num(7.0).requires_grad_()
    assert torch.autograd.gradcheck(prior, w)
    assert torch.autograd.gradgradcheck(prior, w)


def test_gradient_with_respect_to_absent_points_is_exactly_zero():
    raw = torch.tensor([1.0, 0.0, NAN, 3.0], requires_grad=True)
    points = torch.randn(4, 2, requires_grad=True)
    support = Support(points, raw, mask=[True, True, False, True])
    loss = support.weights.square().sum() + support.log_weights[support.valid].sum() + support.points.square().sum()
    g_raw, g_points = torch.autograd.grad(loss, (raw, points))
    assert g_raw.isfinite().all()
    assert g_raw[1] == 0
    assert g_raw[2] == 0
    assert (g_points[2] == 0).all()
    assert torch.equal(g_points[0], 2 * points[0])


def test_function_transforms_pass_through():
    points, raw = torch.randn(3, 4, 2, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
    weights = torch.func.vmap(lambda p, r: Support(p, r).weights)(points, raw)
    torch.testing.assert_close(weights, raw / raw.sum(1, keepdim=True))
    jac = torch.func.jacrev(lambda r: Support(points[0], r).weights)(raw[0])
    torch.testing.assert_close(jac, torch.func.jacfwd(lambda r: Support(points[0], r).weights)(raw[0]))
    pi = raw[0] / raw[0].sum()
    torch.testing.assert_close(jac, (torch.eye(4) - pi[:, None]) / raw[0].sum())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0], "non-negative"),
        ([1.0, NAN], "finite"),
        ([1.0, INF], "finite"),
        ([1.0], r"expected shape \(2,\).*got \(1,\)"),
        ([0.0, 0.0], "no references.*every weight is 0"),
    ],
)
def test_impossible_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        Support(torch.zeros(2, 3), weights)


# -- points -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_points_are_kept_without_a_copy(dtype):
    points = torch.randn(5, 2, 3).to(dtype)
    support = Support(points)
    assert support.points.data_ptr() == points.data_ptr()
    assert support.dtype == dtype
    assert support.weights.dtype == torch.promote_types(dtype, torch.float32)
    assert (support.event_shape, support.d, support.m, len(support)) == ((2, 3), 6, 5, 5)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint16, np.int64, bool])
def test_integers_are_promoted_with_a_note(kind):
    support = Support(np.array([[0], [1]], dtype=kind))
    assert support.dtype == torch.float32
    assert len(support.notes) == 1
    assert "promoted to float32" in support.notes[0]
    assert support.describe().notes == support.notes


def test_unsigned_bytes_do_not_wrap_round():
    support = Support(torch.tensor([0, 255], dtype=torch.uint8))
    assert ((100 - 0.5 * support.points) ** 2).tolist() == [10000.0, 756.25]
    assert denoiser(support, 100.0, 0.5) == 255.0


def test_integers_beyond_float32_become_float64():
    support = Support([2**24 + 1, 0])
    assert support.points.tolist() == [2**24 + 1, 0]
    assert support.dtype == torch.float64


@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        (torch.zeros(0, 4), ValueError, "no references"),
        (torch.zeros(3, 0), ValueError, "non-empty event"),
        ([], ValueError, "no references"),
        (torch.tensor(1.0), ValueError, "got a scalar"),
        (torch.zeros(2, 1, dtype=torch.complex64), TypeError, "complex64"),
        (np.zeros(2, dtype=complex), TypeError, "complex128"),
        (np.array([[1], [1, 2]], dtype=object), TypeError, r"shapes \(1,\), \(2,\)"),
        ([[1.0], [1.0, 2.0]], ValueError, "equal lengths"),
        ([torch.zeros(2), torch.zeros(3)], ValueError, r"shapes \(2,\), \(3,\)"),
        ("features.npy", TypeError, "got str"),
        (torch.zeros(2, 2).to_sparse(), TypeError, "dense"),
    ],
)
def test_what_is_no_set_of_points_is_refused(points, error, message):
    with pytest.raises(error, match=message):
        Support(points)


def test_list_of_vectors_is_stacked():
    assert torch.equal(Support([torch.ones(2), torch.zeros(2)]).points, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_bad_rows_are_counted_and_the_first_is_named():
    with pytest.raises(ValueError, match="1 bad row .*first at index 2"):
        Support([-1.0, 1.0, NAN])
    with pytest.raises(ValueError, match="2 bad rows .*first at index 1"):
        Support([[0.0, 0.0], [0.0, INF], [0.0, 0.0], [NAN, 0.0]])


def test_bad_rows_are_dropped_when_asked_and_rows_index_the_original():
    support = Support([NAN, -1.0, 1.0], weights=[9.0, 1.0, 1.0], labels=["x", "a", "b"], drop_nonfinite=True)
    assert (support.n_used, support.n_dropped, support.rows.tolist()) == (2, 1, [1, 2])
    assert support.given(labels=["b"]).rows.tolist() == [2]
    assert denoiser(support, 0.5, 0.5) == pytest.approx(0.7615941560, abs=1e-9)
    with pytest.raises(ValueError, match="no references.*2 rows"):
        Support([NAN, NAN], drop_nonfinite=True)


def test_what_a_masked_slot_holds_never_matters():
    support = Support(torch.tensor([-1, 1, NAN, 1e30]), mask=torch.tensor([True, True, False, False]))
    assert support.points.tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert denoiser(support, 0.5, 0.5) == pytest.approx(0.7615941560, abs=1e-9)


@pytest.mark.parametrize("mask", [[1.0, 0.0], [True], [2, 0]])
def test_a_mask_is_boolean(mask):
    with pytest.raises((ValueError, TypeError), match="mask: expected"):
        Support(torch.zeros(2, 1), mask=mask)


# -- arrays and memory maps -------------------------------------------------------------------------------------------


def test_numpy_memory_is_shared_when_it_may_be_written():
    array = np.zeros((3, 2), dtype=np.float32)
    assert Support(array).points.data_ptr() == array.__array_interface__["data"][0]


@pytest.mark.parametrize("view", [np.s_[:], np.s_[3:7], np.s_[::2, 1:], np.s_[::-1]])
def test_read_only_memory_map_can_be_changed_in_place_without_touching_the_file(tmp_path, view):
    path = tmp_path / "features.npy"
    values = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    np.save(path, values)
    before = path.read_bytes()
    mapped = np.load(path, mmap_mode="r")
    support = Support(mapped[view])
    assert np.array_equal(support.points.numpy(), values[view])
    support.points.div_(support.points.norm(dim=1, keepdim=True))
    assert path.read_bytes() == before
    assert np.array_equal(mapped, values)


def test_read_only_array_is_copied():
    array = np.ones((3, 2), dtype=np.float32)
    array.flags.writeable = False
    Support(array).points.mul_(2)
    assert (array == 1).all()


def test_big_endian_array_keeps_its_values():
    support = Support(np.array([[1, 2], [3, 4]], dtype=">f4"))
    assert support.dtype == torch.float32
    assert support.points.tolist() == [[1.0, 2.0], [3.0, 4.0]]


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_tasks_equal_their_sets():
    sets = [
        Support(torch.randn(2, 3), labels=["b", "a"]),
        Support(torch.randn(4, 3), [1, 2, 3, 0], labels=["c", "a", "a", "c"]),
        Support(torch.tensor([[0.0] * 3, [NAN] * 3, [1.0] * 3]), labels=["a", "b", "c"], drop_nonfinite=True),
    ]
    tasks = Support.batch(sets)
    assert (tasks.points.shape, tasks.mask.shape, tasks.sizes) == ((3, 4, 3), (3, 4), (2, 4, 2))
    assert (tasks.n_tasks, len(tasks), tasks.n_dropped) == (3, 3, 1)
    assert tasks.label_names == ("a", "b", "c")
    for i, one in enumerate(sets):
        again = tasks.task(i)
        assert torch.equal(again.points, one.points)
        torch.testing.assert_close(again.weights, one.weights)
        assert torch.equal(again.rows, one.rows)
        assert [again.label_names[c] for c in again.labels] == [one.label_names[c] for c in one.labels]
        assert (tasks.points[i, one.m :] == 0).all()
        assert (tasks.rows[i, one.m :] == -1).all()
        assert (tasks.weights[i, one.m :] == 0).all()


def test_padded_tensor_with_mask_equals_separate_sets():
    padded = torch.randn(2, 3, 2)
    padded[0, 2] = NAN
    tasks = Support.batch(padded, mask=torch.tensor([[1, 1, 0], [1, 1, 1]]))
    other = Support.batch([padded[0, :2], padded[1]])
    assert torch.equal(tasks.points, other.points)
    assert torch.equal(tasks.weights, other.weights)
    assert torch.equal(tasks.mask, other.mask)
    assert torch.equal(tasks.rows, other.rows)


def test_scalar_events_and_gradients_in_tasks():
    a, b = torch.randn(2, requires_grad=True), torch.randn(3, requires_grad=True)
    tasks = Support.batch([a, b])
    assert (tasks.points.shape, tasks.event_shape, tasks.d) == ((2, 3), (), 1)
    assert [g.tolist() for g in torch.autograd.grad(tasks.points.sum(), (a, b))] == [[1, 1], [1, 1, 1]]


def test_an_empty_task_is_named():
    with pytest.raises(ValueError, match="batch index 1"):
        Support.batch([torch.ones(2, 1), torch.ones(0, 1), torch.ones(3, 1)])
    mask = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
    with pytest.raises(ValueError, match="batch index 1.*every point is masked"):
        Support.batch(torch.ones(3, 3, 1), mask=mask)
    with pytest.raises(ValueError, match="batch index 2.*every weight is 0"):
        Support.batch(torch.ones(3, 2, 1), weights=[[1, 1], [1, 0], [0, 0]])
    with pytest.raises(ValueError, match="batch index 1.*dropped"):
        Support.batch(torch.tensor([[1.0, 2.0], [NAN, NAN]]), drop_nonfinite=True)


def test_bad_row_of_a_task_is_named():
    with pytest.raises(ValueError, match="1 bad row .*index 0 of task 1"):
        Support.batch(torch.tensor([[1.0, 2.0], [NAN, 3.0]]))
    tasks = Support.batch(torch.tensor([[1.0, 2.0], [NAN, 3.0]]), drop_nonfinite=True)
    assert (tasks.sizes, tasks.n_dropped) == ((2, 1), 1)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([], "at least one task"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], r"one event shape.*\(3,\), \(4,\)"),
        ([Support([1.0], labels=[0]), Support([1.0])], "task 1 has none"),
        (torch.zeros(3), r"\(T, m, \*event\)"),
    ],
)
def test_sets_that_make_no_tasks_are_refused(sets, message):
    with pytest.raises(ValueError, match=message):
        Support.batch(sets)
    with pytest.raises(ValueError, match=r"Support\.batch"):
        Support(torch.zeros(2, 3, 1), mask=np.ones((2, 3), dtype=bool))


# -- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "names", "codes"),
    [
        ([3, 1, 3], (1, 3), [1, 0, 1]),
        (["cat", "ant", "cat"], ("ant", "cat"), [1, 0, 1]),
        (np.array(["b", "a", "b"], dtype=object), ("a", "b"), [1, 0, 1]),
        (torch.tensor([5.0, 2.0, 5.0]), (2, 5), [1, 0, 1]),
    ],
)
def test_labels_keep_their_values(labels, names, codes):
    support = Support(torch.arange(3.0), labels=labels)
    assert support.label_names == names
    assert support.labels.tolist() == codes


@pytest.mark.parametrize("labels", [[1, "a", 2], [0.5, 1.0, 2.0], ["a", None, "b"], [None, 1, 2]])
def test_labels_that_are_no_labels_are_refused(labels):
    with pytest.raises(TypeError, match="labels: expected"):
        Support(torch.arange(3.0), labels=labels)


def test_given_renormalises_and_keeps_rows():
    support = Support(torch.arange(4.0), weights=[1, 2, 3, 4], labels=["a", "b", "a", "c"])
    part = support.given(labels=["a", "c"])
    assert part.points.tolist() == [0.0, 2.0, 3.0]
    assert part.rows.tolist() == [0, 2, 3]
    torch.testing.assert_close(part.weights, torch.tensor([1.0, 3.0, 4.0]) / 8)
    assert part.given(labels="c").rows.tolist() == [3]
    assert Support([1.0, 2.0], labels=[7, 8]).given(labels=torch.tensor(8)).points.tolist() == [2.0]


def test_given_masks_tasks():
    tasks = Support.batch([Support([0.0, 1.0, 2.0], labels=[0, 1, 1]), Support([3.0, 4.0], labels=[1, 2])])
    part = tasks.given(labels=1)
    assert part.mask.tolist() == [[False, True, True], [True, False, False]]
    torch.testing.assert_close(part.weights, torch.tensor([[0, 0.5, 0.5], [1, 0, 0]]))
    with pytest.raises(ValueError, match="task 1 has no point labelled 0"):
        tasks.given(labels=[0])


def test_given_names_what_exists():
    support = Support([0.0, 1.0], labels=["a", "b"])
    with pytest.raises(ValueError, match="unknown 'z'; this support has 'a', 'b'"):
        support.given(labels=["a", "z"])
    with pytest.raises(ValueError, match="at least one"):
        support.given(labels=[])
    with pytest.raises(ValueError, match="no point labelled 'b'"):
        support.given(labels="a").given(labels="b")
    with pytest.raises(ValueError, match="no labels"):
        Support([0.0]).given(labels="a")


# -- duplicates -------------------------------------------------------------------------------------------------------


def first_equal_oracle(points: Tensor, mask: Tensor) -> list[int]:
    def equal(i: int, j: int) -> bool:
        return bool(mask[i] & mask[j] & (points[i] == points[j]).all())

    same = [[j for j in range(i) if equal(i, j)] for i in range(len(points))]
    return [s[0] if s else i for i, s in enumerate(same)]


@pytest.mark.parametrize("colliding", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_duplicates_equal_a_pairwise_comparison(dtype, colliding, monkeypatch):
    if colliding:
        monkeypatch.setattr(_pointset, "hashes", lambda rows: torch.full((len(rows),), 3))
    generator = torch.Generator().manual_seed(1)
    points = torch.randint(-1, 2, (40, 2), generator=generator).to(dtype)
    points[5] = -0.0
    mask = torch.rand(40, generator=generator) > 0.2
    support = Support(points, mask=mask)
    expected = first_equal_oracle(support.points, mask)
    assert support.first_equal.tolist() == expected
    assert support.duplicates == sum(f != i for i, f in enumerate(expected))
    assert support.unique == len({tuple(p) for p in support.points[mask].tolist()})
    assert len(support) == int(mask.sum())


def test_duplicates_are_counted_within_each_task():
    tasks = Support.batch([[[1.0], [1.0], [2.0]], [[1.0], [0.0]]])
    assert (tasks.duplicates, tasks.unique) == (1, 4)
    assert tasks.first_equal.tolist() == [[0, 0, 2], [0, 1, 2]]


# -- summary, moves ---------------------------------------------------------------------------------------------------


def test_summary_agrees_with_numpy_far_from_the_origin():
    values = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32) + np.float32(1e4)
    values[:, 2] = 7
    weights = np.random.default_rng(1).random(500)
    summary = Support(values, weights, labels=["a"] * 499 + ["b"]).describe()
    x, pi = values.astype(np.float64), weights / weights.sum()
    variance = pi @ (x - pi @ x) ** 2
    assert summary.data_scale == pytest.approx(np.sqrt(variance.mean()), rel=1e-12)
    assert summary.mean_norm == pytest.approx(np.linalg.norm(x, axis=1).mean(), rel=1e-12)
    assert (summary.n, summary.d, summary.constant_columns, summary.unique) == (500, 4, 1, 500)
    assert summary.labels == {"a": 499, "b": 1}
    assert SupportSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary


def test_data_scale_of_tasks_is_that_of_each():
    a, b = torch.randn(3, 2, 2), torch.randn(5, 2, 2)
    both = torch.stack([Support(a).data_scale, Support(b).data_scale])
    torch.testing.assert_close(Support.batch([a, b]).data_scale, both, rtol=1e-14, atol=0)


def test_one_point_and_repeated_points_have_scale_zero():
    assert Support([[2.0, -1.0]] * 5).describe().data_scale == 0
    assert Support([[2.0, -1.0]] * 5).unique == 1
    assert Support([[2.0, -1.0]]).describe().constant_columns == 2


def test_moves_keep_everything_but_the_precision():
    support = Support(torch.randn(3, 2), [1, 2, 3], ["a", "b", "a"], [True, True, False], notes=["from a test"])
    half = support.to(dtype=torch.float16)
    assert (half.dtype, half.weights.dtype, half.notes) == (torch.float16, torch.float32, ("from a test",))
    wide = support.to(torch.float64)
    torch.testing.assert_close(wide.weights, torch.tensor([1, 2, 0], dtype=torch.float64) / 3, rtol=1e-15, atol=0)
    assert torch.equal(wide.labels, support.labels)
    assert torch.equal(wide.mask, support.mask)
    with pytest.raises(ValueError, match=r"1e\+06 overflow in float16"):
        Support([1e6]).to(torch.float16)
    with pytest.raises(TypeError, match="int64"):
        support.to(torch.int64)


def test_select_and_task_refuse_the_other_kind():
    with pytest.raises(ValueError, match="take one with"):
        Support.batch([[1.0]]).select([0])
    with pytest.raises(ValueError, match="expected tasks"):
        Support([1.0]).task(0)
    assert Support([1.0, 2.0, 3.0]).select([2, 0]).rows.tolist() == [2, 0]


def test_representation_is_one_short_line():
    support = Support(torch.zeros(3, 8, 8), weights=[1, 1, 1], labels=[0, 1, 1])
    assert repr(support) == "Support(3 points of (8, 8), float32, weighted, 2 labels)"
    tasks = Support.batch([torch.zeros(2, 4), torch.zeros(5, 4)])
    assert repr(tasks) == "Support(2 tasks of 2-5 points of (4,), float32)"
