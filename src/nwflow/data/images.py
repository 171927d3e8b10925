"""Folders of images as supports: class subfolders are labels, pixels are float32 in [0, 1], events are (C, H, W).

Nothing is cropped or squeezed silently: images of several sizes raise until a size is asked for, and the notes say how
many changed their aspect ratio or lost an alpha channel. With an encoder, images go through it in batches and the
events are its features.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from nwflow.data.source import Loaded, Options, check_present, first, plural

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
Encoder = Callable[[Tensor], Tensor]
_BATCH = 32


@dataclass(frozen=True)
class Pixels:
    """One decoded image ``(C, H, W)`` in [0, 1], and what was done to it."""

    values: np.ndarray
    stretched: bool
    had_alpha: bool


def list_images(folder: Path) -> tuple[list[Path], list[str] | None]:
    """Image files in the order of the support's rows, and their labels (names of class folders) if there are such.

    Raises:
        ValueError: images lie both in the folder and in subfolders, so some would have no label.
    """
    visible = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    flat = [p for p in visible if _is_image(p)]
    nested = [(p, sub.name) for sub in visible if sub.is_dir() for p in sorted(sub.iterdir()) if _is_image(p)]
    if flat and nested:
        raise ValueError(
            f"{folder}: {plural(len(flat), 'image')} beside class subfolders with {len(nested)}; expected either kind"
        )
    if nested:
        return [p for p, _ in nested], [name for _, name in nested]
    return flat, None


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".") and (path.is_file() or path.is_symlink())


def load_images(folder: Path, options: Options) -> Loaded:
    """Points ``(m, C, H, W)``, or ``(m, d)`` with an encoder, of an image folder."""
    options.refuse(folder, "an image folder", "key", "label", "weights", "columns")
    paths, labels = list_images(folder)
    if not paths:
        raise ValueError(f"{folder}: no references (no image {', '.join(EXTENSIONS[:4])} ... in it or its subfolders)")
    points, notes = stack_images(folder, paths[: options.limit], options)
    return Loaded(points, None if labels is None else labels[: options.limit], notes=notes)


def stack_images(source: Path, images: Sequence[Path | bytes], options: Options) -> tuple[Tensor, tuple[str, ...]]:
    """Decode images (paths or encoded bytes), to one size and one number of channels, and encode them in batches."""
    encoder, size = options.encoder, options.size
    target = (size, size) if isinstance(size, int) else size
    if target is not None and (len(target) != 2 or min(target) < 1):
        raise ValueError(f"size: expected a positive integer or (height, width), got {size!r}")
    channels = _survey(source, images, target)
    parts, stretched, alpha = [], 0, 0
    for start in range(0, len(images), _BATCH):
        decoded = [_decode(image, target, channels) for image in images[start : start + _BATCH]]
        batch = torch.from_numpy(np.stack([d.values for d in decoded]))
        stretched, alpha = stretched + sum(d.stretched for d in decoded), alpha + sum(d.had_alpha for d in decoded)
        parts.append(batch if encoder is None else _encode(encoder, batch))
    notes = [f"pixels in [0, 1], {channels} channel{'s' * (channels > 1)}"]
    notes += [f"resized to {target[0]}x{target[1]}"] if target else []
    notes += [f"{plural(stretched, 'image')} changed aspect ratio"] if stretched else []
    notes += [f"alpha channel of {plural(alpha, 'image')} left out"] if alpha else []
    notes += [f"encoder: {getattr(encoder, 'name', type(encoder).__name__)}"] if encoder else []
    return torch.cat(parts), tuple(notes)


def _encode(encoder: Encoder, batch: Tensor) -> Tensor:
    with torch.no_grad():
        features = encoder(batch)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(batch):
        got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"encoder: expected features of shape ({len(batch)}, d) for {len(batch)} images, got {got}")
    return features


def _survey(source: Path, images: Sequence[Path | bytes], target: tuple[int, int] | None) -> int:
    """Number of channels for all (1 only if every image is grey); raises for several sizes without a target."""
    sizes: Counter[tuple[int, int]] = Counter()
    grey = True
    for image in images:
        with _opened(image) as picture:
            turned = _orientation(picture) >= 5  # orientations 5 to 8 swap the sides
            sizes[(picture.width, picture.height) if turned else (picture.height, picture.width)] += 1
            grey &= picture.mode in ("1", "L", "LA", "I;16", "I;16B")
    if target is None and len(sizes) > 1:
        listed = first([f"{h}x{w} ({n})" for (h, w), n in sizes.most_common()])
        raise ValueError(f"{source}: {len(images)} images of {len(sizes)} sizes, {listed}; pass size= to resize them")
    return 1 if grey else 3


def _opened(image: Path | bytes) -> Image.Image:
    """The image, opened lazily: nothing is decoded yet."""
    if isinstance(image, Path):
        check_present(image, "an image")
    try:
        return Image.open(image if isinstance(image, Path) else io.BytesIO(image))
    except (OSError, ValueError, Image.DecompressionBombError):
        raise ValueError(f"{_name(image)}: is not a readable image") from None


def _decode(image: Path | bytes, target: tuple[int, int] | None, channels: int) -> Pixels:
    with _opened(image) as picture:
        orientation = _orientation(picture)
        try:
            picture.load()
        except (OSError, ValueError, SyntaxError) as error:
            raise ValueError(f"{_name(image)}: file is truncated or not a readable image ({error})") from None
        alpha = "A" in picture.mode or "transparency" in picture.info
        turned = picture if orientation == 1 else ImageOps.exif_transpose(picture)
        if turned.mode.startswith("I;16"):
            top, plain = 65535.0, turned.convert("I").convert("F")
            planes = [plain] * channels
        else:
            top, planes = 255.0, list(turned.convert("RGB" if channels == 3 else "L").split())
        height, width = turned.height, turned.width
        if target is not None and target != (height, width):
            planes = [p.resize((target[1], target[0]), Image.Resampling.BICUBIC) for p in planes]
        values = np.stack([np.asarray(p, dtype=np.float32) for p in planes]) / np.float32(top)
    stretched = target is not None and target[0] * width != target[1] * height
    return Pixels(values.clip(0, 1), stretched, alpha)  # only bicubic overshoot of 16-bit images lies outside


def _orientation(picture: Image.Image) -> int:
    """How the camera was held (1 = upright), read without decoding: of a .png only what precedes its pixels counts."""
    if picture.format != "PNG":
        return picture.getexif().get(0x0112, 1)
    exif = Image.Exif()
    exif.load(picture.info.get("exif", b""))
    return exif.get(0x0112, 1)


def _name(image: Path | bytes) -> str:
    return str(image) if isinstance(image, Path) else "an image of the table"
