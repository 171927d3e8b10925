r"""A block of samples along the nodes of a path: the one loop, and the samples that leave it early.

At every node from t = 0 (noise) towards t = 1 (data) the field is asked once for all samples that are still under way.
Those whose flow is certified to be one exact step from there (:mod:`nwflow.kernel.certificate`) leave: their later
states are that step, for trajectories and callbacks too, and they cost nothing more. Where the rule corrects x by what
was learnt at the node, the corrected x must be certified as well. Nobody is asked any more when the last has left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nwflow.engine import Engine, Evaluated, Finish
from nwflow.field import Attribution, NWField
from nwflow.sample.adaptive import dopri5
from nwflow.sample.grids import Node
from nwflow.sample.start import Start
from nwflow.sample.steps import Model, Rule

__all__ = ["Callback", "Certificate", "Outcome", "Run", "why_off"]

Callback: TypeAlias = Callable[[int, float, Tensor, Tensor], bool | None]


@dataclass(frozen=True, eq=False)
class Certificate:
    """Which samples were finished by one exact step, and how far they can be from the exact flow.

    Attributes:
        time: ``(n,)``, when each sample left, float64 on the CPU; NaN where it did not.
        bound: ``(n,)``, bound of the distance between the point that is returned and the end of the exact flow from
            the state at ``time``, in data units (under a metric, in its norm); inf where there is none. It is 0 at
            sigma = 0, where both are the reference.
        reference: ``(n,)``, the reference that owns the sample (original row, the first of equal ones), or -1.
        off: why nothing was certified, or None where the certificate was in force.
    """

    time: Tensor
    bound: Tensor
    reference: Tensor
    off: str | None = None

    @property
    def share(self) -> float:
        """Share of the samples that were finished."""
        return float((self.reference >= 0).double().mean())

    @classmethod
    def none(cls, shape: tuple[int, ...], off: str | None) -> "Certificate":
        """Nothing certified yet, or ever."""
        nowhere = torch.full(shape, -1, dtype=torch.long)
        return cls(torch.full(shape, torch.nan, dtype=torch.float64), torch.full(shape, torch.inf), nowhere, off)


def why_off(wanted: bool, field: Any, rule: Any, eta: float, differentiable: bool) -> str | None:
    """Why a run has no certificate, or None; what depends on the support is known to the engine."""
    if not wanted:
        return "not asked for"
    if not isinstance(field, NWField) or type(field).denoise is not NWField.denoise:
        return f"it needs an NWField, and this is a {type(field).__name__}"
    if rule is None:
        return "dopri5 controls the error of all samples together"
    if eta > 0:
        return "noise is renewed (eta > 0), and can lead a sample elsewhere"
    return "derivatives are recorded" if differentiable else None


@dataclass(frozen=True)
class Outcome:
    """What a block of samples came to; the states of all at the last time and, if wanted, at every time."""

    states: list[Tensor]
    denoised: Tensor
    attribution: Attribution | None
    n_eff: Tensor | None
    reached: int
    evaluations: int
    field_evaluations: int
    certificate: Certificate


class _Block:
    """The samples of a block: those under way, in ``live`` with their states kept by the loop, and those finished."""

    def __init__(self, model: Model, x: Tensor, engine: Engine | None, off: str | None, shape: tuple[int, ...]) -> None:
        self.model, self.engine, self.x0 = model, engine, x
        self.live = torch.arange(x.shape[0], device=x.device)
        self.left: list[tuple[Tensor, Finish, Tensor]] = []  # rows, their exact step, bound at unit noise scale
        self.when: list[float] = []
        self.found: Evaluated | None = None
        self.certificate = Certificate.none(shape, off)

    def denoise(self, x: Tensor, t: float) -> Tensor:
        assert self.engine is not None
        self.found = self.engine(x, t, self.live)
        return self.found.denoised

    def release(self, before: Tensor, x: Tensor, a: Node) -> Tensor | None:
        """Let go of the samples that are certified at ``a``; which places of ``x`` stay, or None if all do.

        ``before`` is where the field was asked, ``x`` what the rule made of it.
        """
        if self.engine is None or self.found is None or not bool((sure := self.found.end >= 0).any()):
            return None
        at = sure.nonzero().squeeze(-1)
        end, bound = self.found.end[at], self.found.bound[at]
        if before is not x:
            self.model.asked += len(at)
            end, bound = self.engine.certify(x[at], a.t)
            at, end, bound = at[end >= 0], end[end >= 0], bound[end >= 0]
            if not at.numel():
                return None
        rows, finish = self.live[at], self.engine.finish(x[at], end, a.alpha, a.sigma)
        self.left.append((rows, finish, bound))
        self.when.append(a.t)
        self.certificate.reference[rows.cpu()] = self.engine.references(end).cpu()
        self.certificate.time[rows.cpu()] = a.t
        stay = torch.ones_like(self.live, dtype=torch.bool)
        stay[at] = False
        self.live = self.live[stay]
        kept, last = stay.nonzero().squeeze(-1), self.model.last
        assert last is not None
        self.model.last = (last[0][kept], last[1], last[2][kept])
        return kept

    def all(self, x: Tensor, at: Node, which: int = 0) -> Tensor:
        """x (or, with ``which`` = 1, D) of all samples at a node, given that of those under way."""
        if not self.left:
            return x
        whole = torch.empty_like(self.x0, dtype=x.dtype)
        whole[self.live] = x
        for rows, finish, _ in self.left:
            whole[rows] = finish.at(at.alpha, at.sigma)[which]
        return whole

    def bounds(self, at: Node) -> Certificate:
        """The certificate of a run that ends at a node."""
        for rows, finish, bound in self.left:
            self.certificate.bound[rows.cpu()] = (finish.variance(at.alpha, at.sigma) ** 0.5 * bound).cpu().float()
        return self.certificate

    def last(self) -> tuple[Tensor, float | Tensor]:
        """x and t of every sample's own last evaluation."""
        assert self.model.last is not None
        x, t, _ = self.model.last
        if not self.left:
            return x, t
        whole = torch.empty_like(self.x0, dtype=x.dtype)
        times = torch.full((len(whole),), t, dtype=torch.float64)
        whole[self.live] = x
        for (rows, finish, _), when in zip(self.left, self.when, strict=True):
            whole[rows], times[rows.cpu()] = finish.x, when
        return whole, times


@dataclass(frozen=True)
class Run:
    """What all blocks of samples share; called with a block, it gives what the block came to."""

    start: Start
    at: Sequence[Node]
    rule: Callable[[], Rule] | None
    c: float
    tolerance: float
    trajectory: bool
    attribution: int
    callback: Callback | None
    off: str | None
    required: bool

    def __call__(self, samples: range, advance: Callable[[int], None]) -> Outcome:
        field, x = self.start.field, self.start.state(samples)
        engine = None if self.off is not None else Engine(field, len(samples))
        off = self.off if engine is None else engine.off
        if self.required and off is not None:
            raise ValueError(f"certificate: expected a run that allows it, as it is required; {off}")
        engine = engine if off is None else None
        shape = (len(samples),) if self.start.n_tasks is None else (self.start.n_tasks, len(samples))
        model = Model(field, self.start.path)
        block = _Block(model, x, engine, off, shape)
        if engine is not None:
            model.denoiser = block.denoise
        if self.rule is None:
            states, reached = dopri5(model, x, self.at, self.c, self.tolerance), len(self.at)
            advance(reached - 1)
        else:
            states, reached = self._loop(block, x, self.rule(), samples, advance)
        assert model.last is not None
        named, n_eff = self._references(block)
        last = self.at[max(0, reached - 2)] if reached == len(self.at) else self.at[reached - 1]
        return Outcome(
            states,
            block.all(model.last[2], last, 1),
            named,
            n_eff,
            reached,
            model.evaluations,
            model.asked * (1 if self.start.n_tasks is None else len(samples)),
            block.bounds(self.at[reached - 1]),
        )

    def _loop(
        self, block: _Block, x: Tensor, rule: Rule, samples: range, advance: Callable[[int], None]
    ) -> tuple[list[Tensor], int]:
        """The states at the times reached (without a trajectory, only the last) and how many times were reached."""
        visited: list[Tensor] = []
        for k, (a, b) in enumerate(zip(self.at, self.at[1:], strict=False)):
            known, stay = x, None
            if len(block.live):
                known = block.model(x, a)
                before, x = x, rule.settled(x, known, a)
                stay = block.release(before, x, a)
                if stay is not None:
                    x, known = x[stay], known[stay]
                    rule.keep(stay)
            if self.trajectory or self.callback is not None:
                whole = block.all(x, a)
                visited = [*visited, whole] if self.trajectory else []
                if self.callback is not None and self.callback(k, a.t, whole, block.all(known, a, 1)):
                    return visited or [whole], k + 1
            if len(block.live):
                x = rule.step(block.model, x, known, a, b, partial(self.start.noise, samples, k + 1))
            advance(1)
        return [*visited, block.all(x, self.at[-1])], len(self.at)

    def _references(self, block: _Block) -> tuple[Attribution | None, Tensor | None]:
        """The references with the largest weights, and how many share them, at each sample's last evaluation."""
        if not self.attribution:
            return None, None
        (x, t), field = block.last(), self.start.field
        with torch.no_grad():
            named = field.attribute(x, t, self.attribution) if hasattr(field, "attribute") else None
            return named, field.n_eff(x, t) if hasattr(field, "n_eff") else None
