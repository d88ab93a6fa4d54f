"""The outcomes of deliveries: the values that the executor hands to the recorder."""

from __future__ import annotations

import contextvars
import hashlib
import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from .bounds import LENGTHS

# The parts that differ between like failures: quoted text, addresses, ids, numbers.
_VARYING = re.compile(
    r"""'[^']*'|"[^"]*"|\b0x[0-9a-f]+\b|\b[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\b|\d+(?:[.,:]\d+)*""",
    re.IGNORECASE,
)


def storable(text: str, limit: int = LENGTHS.text) -> str:
    """Return the text as every database takes it: without NUL and lone surrogates, and cut in the middle."""
    text = text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    if len(text) <= limit:
        return text
    half = (limit - 7) // 2
    return f"{text[:half]} [...] {text[-half:]}"


def error_kind(error: str) -> str:
    """Return the first line of an error without numbers, ids and quoted text: like failures have it in common."""
    line = error.strip().partition("\n")[0][: 4 * LENGTHS.kind]
    return _VARYING.sub("…", line)[: LENGTHS.kind]


def error_digest(error: str) -> str:
    """Return eight hexadecimal digits that like failures have in common, and that tell nothing of their text."""
    return hashlib.blake2b(error_kind(error).encode(), digest_size=4).hexdigest()


class Raised(NamedTuple):
    """The exception of a handler (None: only its class may be logged), and the context in which it was raised."""

    error: BaseException | None
    context: contextvars.Context


def class_path(error: BaseException) -> str:
    """Return the path by which Python could import the class of an error: ``builtins.ValueError``."""
    return storable(f"{type(error).__module__}.{type(error).__qualname__}", LENGTHS.error_class)


class Ack(NamedTuple):
    """The handler returned. ``result`` is the value to keep, as JSON; None: no value is kept."""

    result: str | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """The handler failed, and the retry policy says to try again after ``delay``.

    ``payload``, here and below, is the JSON of the payload that the handler leaves; None: the payload stays.
    """

    delay: timedelta
    error: str = ""
    traceback: str = ""
    counts: bool = True
    exception: str = ""
    payload: str | None = field(default=None, repr=False)
    cause: Raised | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The handler failed, and the message is given up."""

    error: str
    traceback: str = ""
    exception: str = ""
    payload: str | None = field(default=None, repr=False)
    cause: Raised | None = field(default=None, compare=False, repr=False)


class Release(NamedTuple):
    """The delivery was released unfinished, which costs no attempt. ``delay`` None keeps the due time.

    ``conflict``: its transaction met another one. Only the first few conflicts of a message cost no attempt.
    """

    reason: str
    delay: timedelta | None = None
    conflict: bool = False


class Unentered(Release):
    """The database gave the handler no transaction, so that it did not begin."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Recorded:
    """The transaction of a transactional handler has recorded the success already."""


Outcome = Ack | Retry | GiveUp | Release | Recorded


def event(outcome: Outcome) -> str:
    """Return the word that the log has for an outcome."""
    match outcome:
        case Ack() | Recorded():
            return "consumed"
        case GiveUp():
            return "dead"
        case Retry(counts=True):
            return "retried"
        case _:
            return "released"
