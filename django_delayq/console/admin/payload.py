"""Payloads for the eyes of operators: readable, and without the values whose names look secret."""

from __future__ import annotations

import json
import re
from typing import Any

from django.views.debug import SafeExceptionReporterFilter, get_default_exception_reporter_filter

MASK = "********"
# Characters of JSON that a page shows, and that a list shows.
LONGEST = 65_536
PREVIEW = 80

_ALSO_SECRET = re.compile(
    r"cookie|credential|session|private|cvc|cvv|iban|bearer|passw|pwd|(?:^|[^a-z])(?:pin|otp|pan)(?:$|[^a-z])"
    r"|card.?(?:no|number)",
    re.IGNORECASE,
)


def pretty(value: Any, *, masked: bool = True) -> str:
    """JSON in lines, redacted unless told otherwise. It is not escaped for HTML."""
    return json.dumps(redacted(value) if masked else value, indent=2, ensure_ascii=False)


def compact(value: Any, *, masked: bool = True) -> str:
    """JSON in one line, redacted unless told otherwise."""
    return json.dumps(redacted(value) if masked else value, ensure_ascii=False)


def preview(value: Any) -> str:
    """The beginning of it in one line, redacted."""
    text = compact(value)
    return text if len(text) <= PREVIEW else text[: PREVIEW - 1] + "…"


def redacted(value: Any) -> Any:
    """The same value, with a mask for all that stands under a name that looks secret, at any depth.

    The names are those that Django hides on its error pages (``hidden_settings`` of the project's
    ``DEFAULT_EXCEPTION_REPORTER_FILTER``), and a few more.
    """
    return _redacted(value, _hidden())


def is_secret(name: str) -> bool:
    """Whether what stands under this name is masked."""
    return _is_secret(name, _hidden())


def _hidden() -> re.Pattern[str]:
    chosen = get_default_exception_reporter_filter()
    hidden: re.Pattern[str] = getattr(chosen, "hidden_settings", SafeExceptionReporterFilter.hidden_settings)
    return hidden


def _is_secret(name: str, hidden: re.Pattern[str]) -> bool:
    return bool(hidden.search(name) or _ALSO_SECRET.search(name))


def _redacted(value: Any, hidden: re.Pattern[str]) -> Any:
    if isinstance(value, dict):
        return {name: MASK if _is_secret(name, hidden) else _redacted(inner, hidden) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner, hidden) for inner in value]
    return value
