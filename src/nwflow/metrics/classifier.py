r"""Classifier two-sample test (C2ST): can a classifier tell samples from data?

.. math:: \mathrm{accuracy} = \frac1{2 n} \sum_i 1[\hat c_{-f(i)}(z_i) = c_i],

with every point predicted by a classifier that did not see its fold (Lopez-Paz & Oquab 2017, arXiv 1610.06545). It is
0.5 on average when both laws are equal and 1 when they do not overlap. Classes are of equal size: a random subset of
the larger sample is used, so that 0.5 is chance and accuracy is balanced accuracy. Both samples live at the data end,
``t = 1``.

Uncertainty. Wilson's interval takes the 2 n predictions as independent; they share training data, so it is approximate,
and the accuracies of the folds are given beside it. A p-value comes from permuted labels, each with its own
cross-validation: exact up to the number of permutations.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nwflow.metrics._points import as_pair, working_dtype
from nwflow.metrics._result import Result, check_count, check_level, permutation_p_value, wilson_interval

_NAMED = ("mlp", "logistic", "neighbours")


@dataclass(frozen=True, kw_only=True)
class C2STResult(Result):
    """Cross-validated accuracy of telling two samples apart; 0.5 is chance.

    ``n`` and ``m`` points were given and ``n_used`` of each classified. ``interval`` has level ``ci``;
    ``fold_accuracies`` are those of the ``folds``. ``p_value`` is None without permutations.
    """

    accuracy: float
    interval: tuple[float, float]
    standard_error: float
    ci: float
    fold_accuracies: tuple[float, ...]
    p_value: float | None
    permutations: int
    classifier: str
    estimator: str
    uncertainty: str
    folds: int
    n: int
    m: int
    n_used: int
    seed: int


def c2st(
    x: Float[Tensor, "n ..."],
    y: Float[Tensor, "m ..."],
    classifier: Any = "mlp",
    *,
    folds: int = 5,
    permutations: int = 0,
    ci: float = 0.95,
    seed: int = 0,
) -> C2STResult:
    """Classifier two-sample test by stratified cross-validation.

    Parameters
    ----------
    x, y
        Samples of shapes (n, *event) and (m, *event), one event shape, any floating dtype; copied to the CPU.
    classifier
        "mlp" (two hidden layers of 64, early stopping), "logistic" (sees shifts of the mean only), "neighbours"
        (k = sqrt(n)), each on standardised features; or a scikit-learn classifier, which is cloned and used as it is.
    folds
        Folds of the cross-validation; both samples need as many points.
    permutations
        Permutations of the labels for the p-value, each a whole cross-validation; 0 for none.
    ci
        Level of the interval.
    seed
        Draws the subset of the larger sample, the folds, the named classifiers' random numbers and the permutations.

    Raises
    ------
    TypeError, ValueError
        For bad points, an unknown classifier, and samples smaller than the number of folds.

    Examples
    --------
    >>> x = torch.linspace(0, 1, 20)
    >>> c2st(x, x + 5, "logistic").accuracy
    1.0
    """
    check_count(folds, "folds", 2)
    check_count(permutations, "permutations", 0)
    check_count(seed, "seed", 0)
    check_level(ci)
    rows = as_pair(x, y, minimum=folds, reason=f"one for each of {folds} folds")
    used = min(len(rows[0]), len(rows[1]))
    features = _features(rows, used, seed)
    labels = np.repeat([0, 1], used)
    model = _classifier(classifier, used, seed)
    correct, fold_accuracies = _cross_validate(model, features, labels, folds, seed)
    generator = np.random.default_rng(seed)
    permuted = (
        _cross_validate(model, features, generator.permutation(labels), folds, seed) for _ in range(permutations)
    )
    as_extreme = sum(other >= correct for other, _ in permuted)
    share = correct / (2 * used)
    return C2STResult(
        accuracy=share,
        interval=wilson_interval(correct, 2 * used, ci),
        standard_error=math.sqrt(share * (1 - share) / (2 * used)),
        ci=ci,
        fold_accuracies=fold_accuracies,
        p_value=permutation_p_value(as_extreme, permutations),
        permutations=permutations,
        classifier=classifier if isinstance(classifier, str) else type(classifier).__name__,
        estimator="stratified cross-validated accuracy, classes balanced by a random subset of the larger sample",
        uncertainty="Wilson score interval of the held-out predictions taken as independent (approximate)",
        folds=folds,
        n=len(rows[0]),
        m=len(rows[1]),
        n_used=used,
        seed=seed,
    )


def _features(rows: tuple[Tensor, Tensor], used: int, seed: int) -> np.ndarray:
    """(2 used, d): as many rows of each, centred on the first sample so that an offset costs no digits."""
    generator = torch.Generator().manual_seed(seed)
    dtype = working_dtype(rows[0].device)
    kept = [r if len(r) == used else r[torch.randperm(len(r), generator=generator)[:used].to(r.device)] for r in rows]
    both = torch.cat([r.to(dtype) for r in kept])
    return (both - both[:used].mean(0)).cpu().numpy()


def _classifier(classifier: Any, used: int, seed: int) -> Any:
    from sklearn.base import is_classifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if not isinstance(classifier, str):
        if isinstance(classifier, type) or not is_classifier(classifier):
            raise TypeError(f"classifier: expected one of {_NAMED} or a scikit-learn classifier, got {classifier!r}")
        return classifier
    if classifier == "mlp":
        stop_early = used >= 100  # a tenth of the training rows must still say something about convergence
        model: Any = MLPClassifier((64, 64), max_iter=300, early_stopping=stop_early, random_state=seed)
    elif classifier == "logistic":
        model = LogisticRegression(max_iter=1000)
    elif classifier == "neighbours":
        model = KNeighborsClassifier(max(1, int(used**0.5)))
    else:
        raise ValueError(f"classifier: expected one of {_NAMED} or a scikit-learn classifier, got {classifier!r}")
    return make_pipeline(StandardScaler(), model)


def _cross_validate(
    model: Any, features: np.ndarray, labels: np.ndarray, folds: int, seed: int
) -> tuple[int, tuple[float, ...]]:
    """Correct held-out predictions, and the accuracy of every fold."""
    from sklearn.base import clone
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import StratifiedKFold

    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    correct, accuracies = 0, []
    for train, held_out in splitter.split(features, labels):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ConvergenceWarning
            )  # a classifier that is not quite fitted is still a valid test
            fresh: Any = clone(model)
            fitted = fresh.fit(features[train], labels[train])
        hits = int((fitted.predict(features[held_out]) == labels[held_out]).sum())
        correct += hits
        accuracies.append(hits / len(held_out))
    return correct, tuple(accuracies)
