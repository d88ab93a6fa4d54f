"""Payloads as pages show them: readable, with a mask for each value whose name looks secret."""

from __future__ import annotations

import json
import re
from typing import Any

from django.views.debug import SafeExceptionReporterFilter, get_default_exception_reporter_filter

MASK = "********"

_ALSO_SECRET = re.compile(
    r"cookie|credential|session|private|cvc|cvv|iban|bearer|passw|pwd|(?:^|[^a-z])(?:pin|otp|pan)(?:$|[^a-z])"
    r"|card.?(?:no|number)",
    re.IGNORECASE,
)


def pretty(value: Any, *, masked: bool = True) -> str:
    """Return a value as indented JSON, redacted unless ``masked`` is False. The text is not escaped for HTML."""
    return json.dumps(redacted(value) if masked else value, indent=2, ensure_ascii=False)


def compact(value: Any, *, masked: bool = True) -> str:
    """Return a value as JSON in one line, redacted unless ``masked`` is False."""
    return json.dumps(redacted(value) if masked else value, ensure_ascii=False)


def preview(value: Any) -> str:
    """Return the beginning of a value as JSON in one line, redacted, for a row of a list."""
    return _beginning(compact(value), 80)


def hover(value: Any) -> str:
    """Return a longer beginning of a value, redacted, for a note under the mouse."""
    return _beginning(pretty(value), 1000)


def _beginning(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def redacted(value: Any) -> Any:
    """Return the same value with a mask for everything under a name that looks secret, at any depth.

    The names are those that Django hides on its error pages (``hidden_settings`` of the project's
    ``DEFAULT_EXCEPTION_REPORTER_FILTER``), and a few more.
    """
    return _redacted(value, _hidden())


def unmasked(given: Any, old: Any) -> Any:
    """Return an edited value with its masks replaced by the values behind them: the part of ``old`` at the same
    position.

    Raises ``LookupError`` for a mask at another position, and for one in a list that was changed.
    """
    shown = redacted(old)
    return given if shown == old else _unmasked(given, shown, old)


def _unmasked(given: Any, shown: Any, old: Any) -> Any:
    """Return the given value; where it is the one that was shown, the old value without a mask."""
    # The JSON texts are compared: 1, 1.0 and true are equal in Python.
    if json.dumps(given) == json.dumps(shown):
        return old
    if isinstance(given, dict) and isinstance(shown, dict):
        return {name: _unmasked(inner, shown.get(name), old.get(name)) for name, inner in given.items()}
    if f'"{MASK}"' in json.dumps(given):
        raise LookupError(MASK)
    return given


def is_secret(name: str, hidden: re.Pattern[str] | None = None) -> bool:
    """Tell whether the value under this name is masked; ``hidden`` are the names that Django hides, if known."""
    return bool((hidden or _hidden()).search(name) or _ALSO_SECRET.search(name))


def _hidden() -> re.Pattern[str]:
    chosen = get_default_exception_reporter_filter()
    hidden: re.Pattern[str] = getattr(chosen, "hidden_settings", SafeExceptionReporterFilter.hidden_settings)
    return hidden


def _redacted(value: Any, hidden: re.Pattern[str]) -> Any:
    if isinstance(value, dict):
        return {name: MASK if is_secret(name, hidden) else _redacted(inner, hidden) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner, hidden) for inner in value]
    return value
