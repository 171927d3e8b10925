r"""One softmax of a model over reference tokens: which image each token is of, and what the result is multiplied with.

    a = softmax(scale q k^T),   added to the layer: strength * region * a v,   h^2 = 1 / scale

is a Nadaraya-Watson smoother of v with prior masses exp(|k|^2 / (2 h^2)) (Smola 2026, arXiv 2605.13386). Whether
references share one softmax differs between models, and ``semantics`` says which it is:

    joint       all references of an adapter share one softmax; the masses of a query sum to 1
    separate    with masks on the image each reference has its own softmax and the results are added: total mass is the
                number of references (one capture for each)
    with_own    references share the softmax with the model's own tokens (SD3): their mass is below 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from nwflow.probe.call import Call

__all__ = ["Capture", "owners"]


@dataclass(frozen=True, eq=False)
class Capture(Call):
    """A :class:`~nwflow.probe.Call` whose keys are reference tokens, as :func:`~nwflow.probe.record_adapter` makes it.

    ``references`` ``(m,)`` maps tokens to images, -1 for the model's own. ``adapter`` is the number of the adapter,
    ``strength`` its scale, ``region`` ``(B, n)`` the mask on the image, ``semantics`` as above.
    """

    adapter: int = 0
    strength: float = 1.0
    semantics: str = "joint"
    region: Float[Tensor, "B n"] | None = None

    @property
    def bandwidth(self) -> float:
        """h of these logits in units of q and k: d^(1/4) for scale 1 / sqrt(d)."""
        return self.logit_scale**-0.5

    def weights(self, normalised: bool = True) -> Float[Tensor, "B H n r"]:
        """The softmax weights of the reference tokens, at least float32.

        Rows sum to 1, also where the model's own tokens take part, unless ``normalised`` is False: then those tokens
        keep their share and the rows sum to :meth:`mass`.
        """
        q, k, _ = self._wide()
        logits = (q * self.logit_scale) @ k.mT
        columns = self._columns()
        if normalised or columns is None:
            return torch.softmax(logits if columns is None else logits[..., columns], -1)
        return torch.softmax(logits, -1)[..., columns]

    def mass(self) -> Float[Tensor, "B H n"]:
        """What all reference tokens together weigh for each query: 1 unless the model's own tokens take part."""
        return self.weights(normalised=False).sum(-1)

    def by_reference(self, normalised: bool = True) -> Float[Tensor, "B H n i"]:
        """Weights summed over the tokens of each image, in increasing order of the images."""
        assert self.references is not None
        owner = [r for r in self.references if r >= 0]
        images, weights = sorted(set(owner)), self.weights(normalised)
        index = torch.tensor([images.index(r) for r in owner], device=weights.device)
        return weights.new_zeros(*weights.shape[:-1], len(images)).index_add_(-1, index, weights)

    def added(self) -> Float[Tensor, "B n H*e"]:
        """What this softmax adds to the layer, before the output projection: strength times region times a v."""
        q, k, v = self._wide()
        assert v is not None
        out = (torch.softmax((q * self.logit_scale) @ k.mT, -1) @ v).transpose(1, 2).flatten(2)
        return self.strength * (out if self.region is None else out * self.region[..., None].to(out.dtype))

    def take(self, rows: Tensor) -> Capture:
        """The record of some of its queries, ``rows`` being their positions."""
        region = None if self.region is None else self.region.index_select(1, rows.to(self.region.device))
        found = super().take(rows)
        assert isinstance(found, Capture)
        return replace(found, region=region)

    def _wide(self) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, v = (
            None if u is None else u.to(torch.promote_types(u.dtype, torch.float32)) for u in (self.q, self.k, self.v)
        )
        assert q is not None and k is not None
        return q, k, v

    def _columns(self) -> Tensor | None:
        assert self.references is not None
        if min(self.references) >= 0:
            return None
        return torch.tensor([i for i, r in enumerate(self.references) if r >= 0], device=self.k.device)


def owners(shape: Sequence[int], tokens: int | None) -> tuple[int, ...]:
    """The image of every token of image states ``(B, images, tokens, C)`` or ``(B, tokens, C)``.

    Where images are flattened, ``tokens`` for each image tells them apart; what it does not divide is one image.

    >>> owners((2, 2, 3, 6), None), owners((2, 4, 6), 4)
    ((0, 0, 0, 1, 1, 1), (0, 0, 0, 0))
    """
    total = shape[-2] if len(shape) == 3 else shape[1] * shape[2]
    each = shape[-2] if len(shape) == 4 else (tokens if tokens and total % tokens == 0 else total)
    return tuple(i // each for i in range(total))
