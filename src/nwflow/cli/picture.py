"""Pictures of samples at t = 1 (data): a grid, and each sample beside the references that made it.

Pixels are enlarged by whole numbers without interpolation, so what is seen is what the points hold (large images are
reduced). The range that is drawn from dark to bright is that of the references: [0, 1], [0, 255] or [-1, 1] where they
fit in, else their extremes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

PAPER, INK, QUIET, RULE = (252, 252, 250), (31, 35, 43), (122, 128, 140), (222, 224, 228)
ACCENT, TRACK, COPY = (46, 111, 204), (229, 233, 240), (200, 76, 56)
_SMALLEST, _LARGEST = 4, 4096  # sides of an event that is taken for an image


def image_axes(event_shape: Sequence[int]) -> str | None:
    """``"hw"``, ``"chw"`` or ``"hwc"`` for what can be an image (1 or 3 channels, sides of 4 to 4096), else None.

    >>> image_axes((8, 8)), image_axes((3, 32, 32)), image_axes((32, 32, 3)), image_axes((64,)), image_axes((2, 8, 8))
    ('hw', 'chw', 'hwc', None, None)
    """

    def sides(*lengths: int) -> bool:
        return all(_SMALLEST <= n <= _LARGEST for n in lengths)

    shape = tuple(event_shape)
    if len(shape) == 2 and sides(*shape):
        return "hw"
    if len(shape) == 3 and shape[0] in (1, 3) and sides(*shape[1:]):
        return "chw"
    return "hwc" if len(shape) == 3 and shape[2] in (1, 3) and sides(*shape[:2]) else None


@dataclass(frozen=True)
class Brush:
    """How points become pixels: the layout of an event, the range drawn dark to bright, and whether it is turned."""

    axes: str
    low: float
    high: float
    invert: bool = False

    @classmethod
    def of(cls, references: Tensor, invert: bool = False) -> Brush | None:
        """The brush for these references ``(m, *event)``, or None when they are no images."""
        axes = image_axes(tuple(references.shape[1:]))
        if axes is None:
            return None
        low, high = (float(v) for v in torch.aminmax(references.detach().float()))
        for a, b in ((0.0, 1.0), (0.0, 255.0), (-1.0, 1.0)):
            if a <= low and high <= b:
                return cls(axes, a, b, invert)
        return cls(axes, low, high if high > low else low + 1.0, invert)

    def outside(self, points: Tensor) -> float:
        """Share of numbers outside the range by more than half a grey level, which are drawn as its ends."""
        slack = (self.high - self.low) / 510
        return float(((points < self.low - slack) | (points > self.high + slack)).double().mean())

    def paint(self, points: Tensor) -> list[Image.Image]:
        """Points ``(n, *event)`` as pictures of one pixel a pixel, RGB."""
        x = ((points.detach().cpu().double() - self.low) / (self.high - self.low)).clamp(0, 1)
        x = x.movedim(1, -1) if self.axes == "chw" else x[..., None] if self.axes == "hw" else x
        values = x.expand(*x.shape[:-1], 3).numpy()
        if self.invert:  # paper where there was black, ink where there was white
            values = 1 - values
            ends = np.array([INK, (255, 255, 255)]) / 255
            values = ends[0] + values * (ends[1] - ends[0]) if x.shape[-1] == 1 else values
        return [Image.fromarray(np.rint(v * 255).astype(np.uint8), "RGB") for v in values]


@dataclass(frozen=True)
class Unit:
    """A sample, the references beside it with their weights, and whether it is a copy of one."""

    sample: Image.Image
    references: Sequence[Image.Image]
    weights: Sequence[float]
    copy: bool = False


def resized(image: Image.Image, side: int) -> Image.Image:
    """The picture a whole number of times larger, its longer side near ``side``; above twice that it is reduced, by
    averaging whole blocks.

    >>> resized(Image.new("L", (8, 8)), 80).size, resized(Image.new("L", (640, 320)), 80).size
    ((80, 80), (160, 80))
    """
    longer = max(image.size)
    if longer > 2 * side:
        return image.reduce(-(-longer // (2 * side)))
    k = max(1, round(side / longer))
    return image.resize((image.width * k, image.height * k), Image.Resampling.NEAREST)


def grid(images: Sequence[Image.Image], columns: int | None = None, side: int = 80, gap: int = 6) -> Image.Image:
    """Equal pictures in rows, with thin gaps on a light ground; about square when ``columns`` is None."""
    cells = [resized(image, side) for image in images]
    width, height = cells[0].size
    columns = columns or max(1, round(math.sqrt(len(cells) * 1.25 * height / width)))
    columns = min(columns, len(cells))
    rows = -(-len(cells) // columns)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, cell in enumerate(cells):
        x, y = gap + i % columns * (width + gap), gap + i // columns * (height + gap)
        sheet.paste(cell, (x, y))
        draw.rectangle((x - 1, y - 1, x + width, y + height), outline=RULE)
    return sheet


def font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """Pillow's own typeface, which needs no file."""
    try:
        return ImageFont.load_default(size)
    except (TypeError, ImportError, OSError):  # Pillow 10.0, or built without FreeType
        return ImageFont.load_default()


@dataclass(frozen=True)
class _Layout:
    """Lengths of one unit, in pixels of the finished picture."""

    sample: tuple[int, int]
    reference: tuple[int, int]
    k: int  # references a unit
    pad: int = 12  # between sample, references and their neighbours
    bar: int = 7
    text: int = 19
    between: int = 44  # units of a row
    margin: int = 36

    @classmethod
    def of(cls, units: Sequence[Unit]) -> _Layout:
        sizes = resized(units[0].sample, 112).size, resized(units[0].sample, 72).size
        return cls(*sizes, max(len(unit.references) for unit in units))

    @property
    def width(self) -> int:
        return self.sample[0] + self.pad + self.k * (self.reference[0] + self.pad) - self.pad

    @property
    def height(self) -> int:
        return max(self.sample[1], self.reference[1] + self.pad // 2 + self.bar + 4 + self.text)


def in_rows(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units in rows of one to four, as many as stay near 1700 pixels."""
    layout = _Layout.of(units)
    columns = max(1, min(4, 1750 // (layout.width + layout.between)))
    return [list(units[i : i + columns]) for i in range(0, len(units), columns)]


def attribution(
    rows: Sequence[Sequence[Unit]], labels: Sequence[str] | None = None, title: str = "", subtitle: str = ""
) -> Image.Image:
    """Each sample beside its references, their weights as bars and percentages below; a red frame marks a copy."""
    layout = _Layout.of([unit for row in rows for unit in row])
    left = layout.margin + (0 if labels is None else max(int(font(34).getlength(label)) for label in labels) + 28)
    top = layout.margin + (46 if title else 0) + (34 if subtitle else 0) + (14 if title or subtitle else 0)
    columns, step = max(map(len, rows)), layout.height + 26
    width = left + columns * (layout.width + layout.between) - layout.between + layout.margin
    heads = max((int(font(s).getlength(t)) for s, t in ((34, title), (24, subtitle)) if t), default=0)
    size = (max(width, heads + 2 * layout.margin), top + len(rows) * step - 26 + layout.margin)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((layout.margin, layout.margin - 6), title, INK, font(34))
    draw.text((layout.margin, layout.margin + (42 if title else 0)), subtitle, QUIET, font(24))
    for r, row in enumerate(rows):
        y = top + r * step
        if labels is not None:
            draw.text((layout.margin, y + layout.sample[1] // 2), labels[r], INK, font(34), anchor="lm")
        for c, unit in enumerate(row):
            _draw_unit(sheet, draw, layout, unit, left + c * (layout.width + layout.between), y)
    return sheet


def _draw_unit(sheet: Image.Image, draw: ImageDraw.ImageDraw, layout: _Layout, unit: Unit, x: int, y: int) -> None:
    width, height = layout.sample
    sheet.paste(resized(unit.sample, 112), (x, y))
    draw.rectangle((x - 3, y - 3, x + width + 2, y + height + 2), outline=COPY if unit.copy else ACCENT, width=3)
    for j, (image, weight) in enumerate(zip(unit.references, unit.weights, strict=True)):
        left, (w, h) = x + width + layout.pad + 4 + j * (layout.reference[0] + layout.pad), layout.reference
        sheet.paste(resized(image, 72), (left, y))
        draw.rectangle((left - 1, y - 1, left + w, y + h), outline=RULE)
        below = y + h + layout.pad // 2
        draw.rectangle((left, below, left + w - 1, below + layout.bar), fill=TRACK)
        if filled := round(weight * w):
            draw.rectangle((left, below, left + filled - 1, below + layout.bar), fill=ACCENT)
        draw.text((left + w // 2, below + layout.bar + 4), _percent(weight), QUIET, font(layout.text), anchor="ma")


def _percent(weight: float) -> str:
    return "<1 %" if weight < 0.005 else f"{100 * weight:.0f} %"
