"""Numbers and names as text: what does not exist says so, and what came from a file stays text.

An interval is ``(value, low, high)``. None, and what a float cannot hold (NaN, infinity), is *not defined*.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nwflow.diagnose.result import Diagnosis

UNDEFINED = "not defined"
_MINUS, _SUPERSCRIPTS = "\u2212", str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LONGEST_SETTING = 160


def defined(value: Any) -> bool:
    """Whether there is a finite number, or an interval around one."""
    if isinstance(value, (tuple, list)):
        return bool(value) and defined(value[0])
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 3) -> str:
    """``digits`` significant digits, thousands apart, powers of ten where zeros would hide the number.

    >>> number(12345.6), number(0.0123456), number(-1.5e-7), number(None)
    ('12,346', '0.0123', '−1.5×10⁻⁷', 'not defined')
    """
    if value is None or not math.isfinite(value):
        return UNDEFINED
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}".replace("-", _MINUS)
    exponent = math.floor(math.log10(abs(value)))
    if -4 < exponent < 6:
        return f"{value:,.{max(0, digits - 1 - exponent)}f}".replace("-", _MINUS)
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}×10{str(int(power)).translate(_SUPERSCRIPTS)}".replace("-", _MINUS)


def plain(value: float | None) -> str:
    """:func:`number` without zeros at the end.

    >>> plain(0.5), plain(1e-5), plain(20.0)
    ('0.5', '10⁻⁵', '20')
    """
    text = number(value).removeprefix("1×") if value != 1 else "1"
    return text.rstrip("0").rstrip(".") if "." in text and "×" not in text else text


def fixed(value: float | None, places: int = 2) -> str:
    """Digits that line up in a column; very large ones fall back to :func:`number`.

    >>> fixed(0.5), fixed(-1.234), fixed(-0.0001), fixed(123456.7)
    ('0.50', '−1.23', '0.00', '123,457')
    """
    if value is None or not math.isfinite(value):
        return UNDEFINED
    if abs(value) >= 1000:
        return number(value)
    text = f"{value:.{places}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", _MINUS)


def percent(value: float | None) -> str:
    r"""A share in whole percent.

    >>> percent(0.423), percent(-0.02), percent(0.004)
    ('42\xa0%', '−2\xa0%', '0.4\xa0%')
    """
    if value is None or not math.isfinite(value):
        return UNDEFINED
    places = 1 if 0 < abs(value) < 0.01 or 0.99 < value < 1 else 0
    return f"{fixed(100 * value, places)}\N{NO-BREAK SPACE}%"


def interval(value: Sequence[float | None] | None, form: Any = number) -> str:
    r"""``value [low, high]``; the value alone where its interval is not defined.

    >>> interval((0.5, 0.25, 0.75)), interval((0.5, None, None)), interval(None)
    ('0.500 [0.250,\xa00.750]', '0.500', 'not defined')
    """
    if not defined(value):
        return UNDEFINED
    assert value is not None
    return form(value[0]) + bounds(value, form, " [{},\N{NO-BREAK SPACE}{}]")


def bounds(value: Sequence[float | None] | None, form: Any = number, frame: str = "{} to {}") -> str:
    """The two ends of an interval; nothing where they are not defined."""
    if value is None or not (defined(value[1]) and defined(value[2])):
        return ""
    return frame.format(form(value[1]), form(value[2]))


def setting(value: Any) -> str:
    """What was fitted, of any type of JSON, in one short line.

    >>> setting({"h0": 0.25, "rank": 8, "shape": [1, 2]})
    'h0 = 0.25, rank = 8, shape = 1, 2'
    """
    if isinstance(value, Mapping):
        text = ", ".join(f"{name} = {setting(v)}" for name, v in value.items())
    elif isinstance(value, (list, tuple)):
        text = ", ".join(setting(v) for v in value)
    elif value is None:
        text = "none"
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    else:
        text = plain(value) if isinstance(value, (int, float)) else str(value)
    return text if len(text) <= _LONGEST_SETTING else text[:_LONGEST_SETTING] + "…"


def duration(seconds: float | None) -> str:
    """
    >>> duration(3.21), duration(125), duration(7260)
    ('3.2 s', '2 min 5 s', '2 h 1 min')
    """
    if not defined(seconds):
        return UNDEFINED
    assert seconds is not None
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def inert(text: str) -> str:
    """``text`` for plotly, which reads tags, entities and ``%{...}`` in its labels: shown as it is, never obeyed.

    >>> inert("<b>a</b>%{x} & b")
    '&lt;b&gt;a&lt;/b&gt;%\u200b{x} &amp; b'
    """
    text = re.sub(r"[\x00-\x1f\x7f\u2028\u2029]", " ", text).replace("&", "&amp;")
    text = text.replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([%$])(?=\{)", "\\1\u200b", text)


def why_undefined(diagnosis: Diagnosis) -> str:
    """One reason for what the whole diagnosis lacks."""
    data = diagnosis.data
    if data.n < 2:
        return "one point alone: nothing can be held out"
    if data.unique < 2:
        return "all points are equal: nothing can be held out"
    if data.queries < 1:
        return "no held-out points"
    return "not measured in this run"
