"""Families by name, as the command line and saved configurations speak of them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from nwflow.data import BUNDLED
from nwflow.tasks.family import Family
from nwflow.tasks.features import LabelledFeatures
from nwflow.tasks.mixed import Mixed
from nwflow.tasks.mixtures import GaussianMixtures
from nwflow.tasks.moons import Moons
from nwflow.tasks.rings import Rings
from nwflow.tasks.shells import SphericalShells
from nwflow.tasks.spirals import Spirals

FAMILIES: dict[str, type[Family]] = {
    cls.name: cls for cls in (GaussianMixtures, SphericalShells, Rings, Moons, Spirals)
}


def make_family(
    name: str,
    *,
    dim: int | None = None,
    leave_out: tuple[str, ...] = (),
    parameters: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Family:
    """The family called ``name``.

    Args:
        name: a key of ``FAMILIES``; several joined by ``+``, which are mixed; or a file, folder or bundled set with
            labels, whose classes become tasks.
        dim: coordinates of a point, where the family has that parameter (their own default when None).
        leave_out: names of the families that only the test part draws from, where several are mixed.
        parameters: further parameters of the dataclass, the same for all that are mixed.
        options: for a file, the options of :func:`nwflow.data.load_support`.

    Raises:
        ValueError: an unknown name or parameter, or one without meaning for this family.

    Example:
        >>> make_family("spherical_shells", dim=3, parameters={"noise": 0.1}).noise
        0.1
        >>> make_family("rings+moons", leave_out=("moons",)).names
        ('rings', 'moons')
    """
    parameters, names = dict(parameters or {}), name.split("+")
    synthetic = all(part in FAMILIES for part in names)
    if leave_out and (len(names) < 2 or not synthetic):
        raise ValueError(f"leave_out: expected several families joined by +, got {name!r}")
    if synthetic:
        if options:
            raise ValueError(f"{', '.join(options)}: no meaning for {name}, which reads no file")
        families = tuple(_family(part, dim, parameters) for part in names)
        return families[0] if len(families) == 1 else Mixed(families, tuple(leave_out))
    if name not in BUNDLED and not Path(name).expanduser().exists():
        known = ", ".join([*FAMILIES, *BUNDLED])
        raise ValueError(f"tasks: expected one of {known}, several of the first joined by +, or a file, got {name!r}")
    _check_known(name, parameters, ("validation", "test", "seed", "min_rows"))
    family = LabelledFeatures.load(name, **parameters, **(options or {}))
    if dim is not None and dim != family.support.d:
        raise ValueError(f"dim: expected {family.support.d}, the coordinates of {name}, or none, got {dim}")
    return family


def _family(name: str, dim: int | None, parameters: dict[str, Any]) -> Family:
    known = tuple(f.name for f in fields(FAMILIES[name]))
    if dim is not None:
        parameters = {"dim": dim, **parameters}
    _check_known(name, parameters, known)
    return FAMILIES[name](**parameters)


def _check_known(name: str, parameters: dict[str, Any], known: tuple[str, ...]) -> None:
    if unknown := [p for p in parameters if p not in known]:
        raise ValueError(f"{', '.join(unknown)}: no parameter of {name}, which has {', '.join(known)}")
