"""Payloads for the eyes of operators: readable, and without the values whose names look secret."""

from __future__ import annotations

import json
import re
from typing import Any

from django.views.debug import SafeExceptionReporterFilter, get_default_exception_reporter_filter

MASK = "********"

_ALSO_SECRET = re.compile("cookie|credential|session|private|cvc|cvv|iban", re.IGNORECASE)


def pretty(value: Any) -> str:
    """JSON in lines, redacted. It is not escaped for HTML."""
    return json.dumps(redacted(value), indent=2, ensure_ascii=False)


def redacted(value: Any) -> Any:
    """The same value, with a mask for all that stands under a name that looks secret, at any depth.

    The names are those that Django hides on its error pages (``hidden_settings`` of the project's
    ``DEFAULT_EXCEPTION_REPORTER_FILTER``), and a few more.
    """
    chosen = get_default_exception_reporter_filter()
    hidden = getattr(chosen, "hidden_settings", SafeExceptionReporterFilter.hidden_settings)
    return _redacted(value, hidden)


def _redacted(value: Any, hidden: re.Pattern[str]) -> Any:
    if isinstance(value, dict):
        return {
            name: MASK if hidden.search(name) or _ALSO_SECRET.search(name) else _redacted(inner, hidden)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_redacted(inner, hidden) for inner in value]
    return value
