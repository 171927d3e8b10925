"""Docstrings for the site: what they take from reStructuredText is turned into Markdown, for the API reference alone.

Roles such as :class:`~a.b.C` become code, and so does mathematics; tables between rules of "=====" become tables.
"""

import re
import textwrap
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`(?:[^`<]*<)?(?P<tilde>~?)(?P<path>[\w.]+)>?`")
MATH = re.compile(r":math:`([^`]+)`")
MATH_BLOCK = re.compile(r"^( *)\.\. math::\s*(.+(?:\n(?!\s*\n).+)*)", re.MULTILINE)
RULE = r"^ *=+(?: +=+)+ *$\n?"
TABLE = re.compile(rf"{RULE}(?P<first>(?:^.+\n)+?){RULE}(?:(?P<second>(?:^.+\n)+?){RULE})?", re.MULTILINE)


def _rows(text: str) -> list[str]:
    return ["| " + " | ".join(re.split(r"\s{2,}", line.strip())) + " |" for line in text.splitlines()]


def _table(match: re.Match[str]) -> str:
    first, second = _rows(match["first"]), _rows(match["second"] or "")
    columns = first[0].count(" | ") + 1
    head, body = (first, second) if second else (["|" + "  |" * columns], first)
    indent = " " * (len(match[0]) - len(match[0].lstrip(" ")))
    return textwrap.indent("\n".join([*head, "|" + " --- |" * columns, *body]), indent) + "\n"


def _block(match: re.Match[str]) -> str:
    formula = re.sub(r"\n\s*", "\n", match[2])
    return textwrap.indent(f"```text\n{formula}\n```", match[1])


def to_markdown(text: str) -> str:
    """A docstring with its roles, mathematics and tables in Markdown.

    >>> to_markdown("See :func:`~nwflow.paths.convert`, :math:`s_i`.")
    'See `convert`, `s_i`.'
    """
    text = MATH_BLOCK.sub(_block, TABLE.sub(_table, text))
    text = ROLE.sub(lambda m: f"`{m['path'].rpartition('.')[2] if m['tilde'] else m['path']}`", text)
    return MATH.sub(r"`\1`", text)


class Docstrings(griffe.Extension):
    """Runs over every object that the reference shows, before its docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
