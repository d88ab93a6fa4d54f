"""The texts of terms, as links have them: each finds exactly what it was made of."""

from __future__ import annotations

import re

_PLAIN = re.compile(r'[^\s":*\\,=#][^\s":*\\,=]*')


def term_text(name: str, value: str) -> str:
    """Return the text of a term that means exactly this value, for links."""
    return f"{name}:{quoted(value)}"


def exact_error_text(kind: str) -> str:
    """Return the text of a term for the messages whose last error is of exactly this kind."""
    return f"error:={quoted(kind)}"


def quoted(text: str) -> str:
    """Return a value, between quotation marks if it could be read as something else."""
    # Digits without quotes would be read as an id.
    if _PLAIN.fullmatch(text) and not text.isdigit():
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
