r"""What fields of several heads share: their constructors, what a sampler asks for, and attribution.

Attribution of a sample is the mean over its coordinates of the weights that made each of them: with w^g the weights of
the head that writes the block B_g of the d coordinates,

    w_i = sum_g (|B_g| / d) w_i^g,

the share of the sample that comes from reference i (for patches the mean over pixels). t = 0 is noise, t = 1 is data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from nwflow._moments import Attribution
from nwflow.metric import Smoothing, as_smoothing
from nwflow.paths import CondOT, Path
from nwflow.support import Support

if TYPE_CHECKING:
    from nwflow.subspace.blocks import BlockField
    from nwflow.subspace.patches import PatchField

CHUNK = 2**22  # weights held at once by attribution


class SubspaceField(nn.Module):
    """A field of several Nadaraya-Watson heads, one for each part of the event; made by ``columns``, ``pca`` and
    ``patches``.

    All have ``velocity`` (also ``field(x, t)``), ``denoise``, ``noise``, ``score``, ``n_eff`` (one for each head),
    ``weights`` and ``attribute``, and go into :func:`nwflow.sample`. The support is fixed: points and weights that
    require grad are refused.

    Example:
        >>> digits = torch.rand(20, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> SubspaceField.patches(digits, size=3)
        PatchField(heads (8, 8) of 3 x 3 pixels, boundary=wrap, 20 references, CondOT(sigma_min=0.0))
        >>> field = SubspaceField.columns([[0.0, 0.0], [1.0, 1.0]], groups=[[0], [1]])
        >>> field.denoise(torch.tensor([[0.1, 0.9]]), 0.9)  # a new point, its columns from two references
        tensor([[0.0000, 1.0000]])
    """

    points: Tensor

    def __init__(self, support: Support | Any, path: Path | None, smoothing: Smoothing | None) -> None:
        super().__init__()
        support = support if isinstance(support, Support) else Support(support)
        for name, value in (("points", support.points), ("weights", support.raw_weights)):
            if value is not None and value.requires_grad:
                raise ValueError(f"{name}: expected a fixed support, got {name} that require grad; detach() them")
        if path is not None and not isinstance(path, Path):
            raise TypeError(f"path: expected a nwflow Path such as CondOT(), got {type(path).__name__}")
        self.path, self.smoothing = CondOT() if path is None else path, smoothing
        self.event_shape, self.d, self.m, self.is_batch = support.event_shape, support.d, support.m, support.is_batch
        self._source = support
        self.register_buffer("points", support.points)
        self._seen = self.points

    @staticmethod
    def columns(
        support: Support | Any,
        path: Path | None = None,
        *,
        groups: Sequence[Sequence[int]],
        smoothing: Any = None,
        accuracy: float | None = 1e-5,
    ) -> BlockField:
        """One head for each group of columns of the flattened event.

        Args:
            support: references ``(m, *event)``, or tasks. path: ``CondOT()`` when None.
            groups: disjoint lists of columns, from 0 to d - 1, that together hold every column.
            smoothing: None, a standard deviation h0, an isotropic :class:`~nwflow.Smoothing`, or one of these for each
                group.
            accuracy: tolerance of the weights of each head, as in :class:`~nwflow.NWField`.

        Raises:
            ValueError: groups that are no partition; the columns that are missing or repeated are named.
        """
        from nwflow.subspace.blocks import BlockField

        return BlockField(support, path, groups=groups, smoothing=smoothing, accuracy=accuracy)

    @staticmethod
    def pca(
        support: Support | Any,
        path: Path | None = None,
        *,
        block: int | None = None,
        blocks: int | None = None,
        smoothing: Any = None,
        accuracy: float | None = 1e-5,
    ) -> BlockField:
        """One head for each block of consecutive principal directions of the support (pooled over tasks).

        Args:
            block: directions of a block; the last block has what remains. Or
            blocks: how many blocks, of sizes that differ by at most 1.
            support, path, smoothing, accuracy: as in :meth:`columns`.

        Every direction belongs to a block, also those in which the support has no variance. Directions of equal
        variance are determined up to a rotation among themselves.

        Raises:
            ValueError: not exactly one of ``block`` and ``blocks``, or out of 1 to d; fewer than 2 points.
        """
        from nwflow.subspace.blocks import BlockField, principal_basis, sizes

        support = support if isinstance(support, Support) else Support(support)
        cut, groups = 0, []
        for size in sizes(support.d, block, blocks):
            groups.append(list(range(cut, cut + size)))
            cut += size
        basis = principal_basis(support)
        return BlockField(support, path, groups=groups, basis=basis, smoothing=smoothing, accuracy=accuracy)

    @staticmethod
    def patches(
        support: Support | Any,
        path: Path | None = None,
        *,
        size: int = 5,
        boundary: Literal["wrap", "zero"] = "wrap",
        stride: int = 1,
        smoothing: Any = None,
    ) -> PatchField:
        """One head for each pixel of images ``(H, W)`` or ``(C, H, W)``: its weights come from the ``size`` x ``size``
        patch around it, all channels, at the same place in every reference.

        Args:
            support: one set of images. path: ``CondOT()`` when None.
            size: pixels of a side of the patch, odd; with ``stride``, of the parity of ``stride`` and at least that.
            boundary: ``"wrap"``, the image is a torus; ``"zero"``, pixels outside do not count. A patch that covers
                the image holds every pixel once.
            stride: a head writes ``stride`` x ``stride`` pixels, and there are stride^2 times fewer heads. With
                ``size = stride`` the patches are disjoint and the heads independent.
            smoothing: None, or a standard deviation h0 of every pixel.
        """
        from nwflow.subspace.patches import PatchField

        return PatchField(support, path, size=size, boundary=boundary, stride=stride, smoothing=smoothing)

    @property
    def support(self) -> Support:
        """The references, on the device and in the dtype of the field."""
        if self.points is not self._seen:
            s = self._source.to(self.points.device)
            self._source = s.rebuilt(self.points, s.raw_weights, s.labels, s.mask, s.rows)
            self._seen = self.points
        return self._source

    def forward(self, x: Tensor, t: float | Tensor) -> Tensor:
        """The velocity u(x, t), shape and dtype of ``x``."""
        return self.velocity(x, t)

    def velocity(self, x: Tensor, t: float | Tensor) -> Tensor:
        """u = alpha' D + sigma' eps, shape and dtype of ``x``; raises at sigma = 0 unless smoothed."""
        return self._vector(x, t, "velocity")

    def denoise(self, x: Tensor, t: float | Tensor) -> Tensor:
        """D, every part from the weights of its own head; shape and dtype of ``x``."""
        return self._vector(x, t, "denoiser")

    def noise(self, x: Tensor, t: float | Tensor) -> Tensor:
        """eps = (x - alpha D) / sigma (without smoothing); raises at sigma = 0 unless smoothed."""
        return self._vector(x, t, "noise")

    def score(self, x: Tensor, t: float | Tensor) -> Tensor:
        """(alpha D - x) / sigma^2 (without smoothing); raises at sigma = 0 unless smoothed."""
        return self._vector(x, t, "score")

    def _vector(self, x: Tensor, t: float | Tensor, name: str) -> Tensor:
        raise TypeError(f"{type(self).__name__} is abstract: use SubspaceField.columns, .pca or .patches")

    def _batch(self, x: Tensor) -> tuple[int, ...]:
        """The batch shape of ``x``; refuses what is no floating tensor ``(*batch, *event)``."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x: expected a floating tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        cut = x.ndim - len(self.event_shape)
        if cut < 0 or tuple(x.shape[cut:]) != self.event_shape:
            raise ValueError(
                f"x: expected shape (*batch, *event) with event {self.event_shape}, got {tuple(x.shape)}: "
                f"queries and support must have the same width"
            )
        if x.device != self.points.device:
            raise ValueError(f"x: expected a tensor on {self.points.device} as the support, got {x.device}")
        return tuple(x.shape[:cut])


def isotropic(value: Any) -> Smoothing | None:
    """None, or an isotropic smoothing; refuses others, which have no meaning for a head alone."""
    smoothing = as_smoothing(value)
    if smoothing is not None and smoothing.kind != "isotropic":
        raise ValueError(f"smoothing: expected an isotropic one for each head, got {smoothing.kind}")
    return smoothing


def largest(w: Tensor, rows: Tensor, k: int) -> Attribution:
    """The ``k`` largest of weights ``(*batch, m)`` over references of these ``rows`` ``(*batch or (), m)``."""
    w = w.clamp(max=1.0)  # rounding
    weights, index = w.topk(min(k, w.shape[-1]), -1)
    named = rows.expand(*w.shape[:-1], -1).gather(-1, index)
    return Attribution(named, weights, weights.sum(-1).clamp(max=1.0))


def joined(parts: list[Attribution], batch: tuple[int, ...], axis: int) -> Attribution:
    """Attributions of consecutive chunks of queries as one of this batch shape."""
    if not parts:
        raise ValueError(f"x: expected at least one query, got batch shape {batch}")
    values = ([getattr(p, name) for p in parts] for name in ("indices", "weights", "captured"))
    index, weights, captured = (torch.cat(v, axis) for v in values)
    k = index.shape[-1]
    return Attribution(index.reshape(*batch, k), weights.reshape(*batch, k), captured.reshape(batch))


def at_least_one(k: Any) -> int:
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"k: expected an integer of at least 1, got {k!r}")
    return k
