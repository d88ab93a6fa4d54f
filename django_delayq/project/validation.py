"""Checks the arguments of a call. Every check is made at the call, before anything is written."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence, Set
from datetime import UTC, datetime, timedelta
from enum import Enum
from math import isfinite
from pathlib import PurePath
from typing import Any, Literal, TypeVar

from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import QuerySet
from django.utils.datastructures import MultiValueDict
from django.utils.functional import Promise

from ..core import values
from ..core.bounds import LENGTHS, PRIORITIES
from ..core.durations import Duration, seconds
from ..core.exceptions import InvalidMessage, PayloadTooLarge
from ..core.outcomes import storable
from ..core.own_header import OWN_HEADER, without_own_part
from ..core.text import shown
from . import conf

# A payload or a result that is nested deeper is refused at the call.
PAYLOAD_MAX_DEPTH = 64
HEADERS_MAX_BYTES = 16_384
# The farthest due time from now: 100 years.
FARTHEST = timedelta(seconds=values.CENTURY)
# The clocks of two hosts may differ: a due time that is up to this far in the past still means "now".
PAST_TOLERANCE = timedelta(seconds=60)

T = TypeVar("T")


def checked(what: str, check: Callable[..., T], *given: Any) -> T:
    """Return what a check of ``values`` returns. Raises ``InvalidMessage`` with the name of the argument."""
    try:
        return check(*given)
    except ValueError as error:
        raise InvalidMessage(f"{what} {error}") from None


def topic(value: Any) -> str:
    """Check a topic: 1 to 100 of ``A-Z a-z 0-9 _ . : / -``, beginning with a letter or digit."""
    return checked("topic", values.topic, value, LENGTHS.topic)


def queue(value: Any) -> str:
    """Check a queue: 1 to 64 of ``A-Z a-z 0-9 _ . -``, beginning with a letter or digit."""
    return checked("queue", values.word, value, LENGTHS.queue)


def key(value: Any) -> str | None:
    """Check a key: 1 to 200 printable characters, without a space at either end; or None."""
    return None if value is None else checked("key", values.key, value, LENGTHS.key)


def limit_key(value: Any) -> str:
    """Check a limit key: as a key, or a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value) if -(10**LENGTHS.key) < value < 10**LENGTHS.key else value
    return checked("limit key", values.key, value, LENGTHS.key)


def priority(value: Any) -> int:
    """Check a priority: a whole number from -100 to 100; the greater one goes first."""
    return checked("priority", values.whole, value, *PRIORITIES)


def delay(value: Duration, what: str = "delay", for_datetime: str = "a datetime is given as due_at") -> timedelta:
    """Check a delay: 0 or more, up to 100 years. ``what`` is its name in an error, ``for_datetime`` the hint there."""
    try:
        return timedelta(seconds=checked(what, values.span, value))
    except InvalidMessage as error:
        raise _with_hint(error, value, datetime, for_datetime) from None


def _with_hint(error: InvalidMessage, value: Any, kinds: type | tuple[type, ...], hint: str) -> InvalidMessage:
    """Return the error, with a hint if the value is of one of these kinds."""
    return InvalidMessage(f"{error}; {hint}") if isinstance(value, kinds) else error


def due(value: Any, what: str = "due_at") -> datetime:
    """Check a due time: an aware datetime, not in the past, at most 100 years ahead. Return it in UTC."""
    try:
        found = checked(what, values.moment, value)
    except InvalidMessage as error:
        hint = "a time from now is given as delay"
        raise _with_hint(error, value, (int, float, timedelta), hint) from None
    ahead = found - datetime.now(UTC)
    if ahead > FARTHEST:
        raise InvalidMessage(f"{what} is more than 100 years ahead")
    if ahead < -PAST_TOLERANCE:
        raise InvalidMessage(f"{what} is in the past: {value.isoformat()}")
    return found


def expires(value: Duration | Literal[False] | None) -> timedelta | None:
    """Check how long after its due time a message may still start: more than 0, at most 100 years; False: for ever."""
    if value is None or value is False:
        return None
    try:
        return timedelta(seconds=checked("expires", values.span, value, values.SHORTEST))
    except InvalidMessage as error:
        raise _with_hint(error, value, datetime, "it counts from the due time") from None


def unique(value: Duration) -> tuple[int | None, float | None]:
    """Check how long a message holds its key; return the columns ``key_deliveries`` and ``key_for`` that say so."""
    if isinstance(value, str) and value in ("live", "scheduled"):
        return (None, None) if value == "live" else (0, None)
    try:
        seconds(value)
    except ValueError:
        raise InvalidMessage(
            f'unique must be "live", "scheduled", or a duration such as "1h", not {shown(value)}'
        ) from None
    return None, checked("unique", values.span, value, values.SHORTEST)


def max_attempts(value: Any) -> int | None:
    """Check the greatest number of attempts: a whole number from 1 to 10000; or None."""
    return None if value is None else checked("max_attempts", values.whole, value, 1, 10_000)


def timeout(value: Duration | None) -> float | None:
    """Check a timeout: 10 ms to 30 days, in seconds; False for none, which is 0; or None."""
    if value is None or value is False:
        return None if value is None else 0.0
    return checked("timeout (False: none)", values.span, value, 0.01, 30 * values.DAY)


def lease(value: Duration | None) -> float | None:
    """Check a lease: 1 second to 1 day, in seconds; or None."""
    return None if value is None else checked("lease", values.span, value, 1, values.DAY)


def reason(value: Any, what: str = "reason") -> str:
    """Check the reason of an action: any text. Characters that a database cannot store are replaced.

    ``what`` is its name in an error.
    """
    if not isinstance(value, str | Promise):
        raise InvalidMessage(f"{what} must be text, not {shown(value)}")
    return storable(str(value))


def payload(value: Any) -> str:
    """Return the payload as JSON text. DjangoJSONEncoder turns Decimal, datetime, UUID and the like into strings."""
    return payload_and_value(value)[0]


def payload_and_value(value: Any) -> tuple[str, dict[str, Any] | None]:
    """Return the payload as JSON text, and the value of that text; None where only decoding the text would tell it."""
    is_flat = _is_flat(value)
    text, size = _encode("payload", value, PAYLOAD_MAX_DEPTH, is_flat=is_flat)
    if size > conf.get().PAYLOAD_MAX_BYTES:
        raise _too_large("payload", size, "; store the data elsewhere and schedule a reference to it")
    return text, value.copy() if is_flat else None


def _too_large(what: str, size: int, hint: str = "") -> PayloadTooLarge:
    most = conf.get().PAYLOAD_MAX_BYTES
    return PayloadTooLarge(f"the {what} has {size} bytes of JSON, more than DELAYQ['PAYLOAD_MAX_BYTES'] = {most}{hint}")


def payload_of_any_size(value: Any) -> str:
    """Return the payload as JSON text, however large it is: for a caller that has a bound of its own."""
    return _encode("payload", value, PAYLOAD_MAX_DEPTH)[0]


def result(value: Any) -> str | None:
    """Return what a handler returned as JSON text, under the same rules as a payload; None for None."""
    if value is None:
        return None
    text, size = _encode("result", value, PAYLOAD_MAX_DEPTH)
    if size > conf.get().PAYLOAD_MAX_BYTES:
        raise _too_large("result", size)
    return text


def given_headers(value: Any) -> str:
    """Return the headers of a call as JSON. Notes of the queue in the headers of another message are not passed on."""
    if isinstance(value, Mapping) and OWN_HEADER in value:
        value = without_own_part(dict(value))
    return headers(value)


def follow_up(value: Any) -> str | Literal[False]:
    """Check the topic of the message that follows an end. False: none follows."""
    return False if value is False else topic(value)


def headers(value: Any) -> str:
    """Return headers as JSON text: a dict of JSON values, at most 16 KiB in all."""
    if value is None:
        return "{}"
    if not isinstance(value, Mapping):
        raise InvalidMessage(f"headers must be a dict, not {type(value).__name__}")
    text, size = _encode("headers", dict(value), 4)
    if size > HEADERS_MAX_BYTES:
        raise InvalidMessage(f"headers have more than {HEADERS_MAX_BYTES} bytes of JSON")
    return text


# No search for circles: ``_walk`` has bounded the depth of the value.
_ENCODER = DjangoJSONEncoder(allow_nan=False, ensure_ascii=False, check_circular=False, separators=(",", ":"))


def _encode(what: str, value: Any, depth: int, *, is_flat: bool = False) -> tuple[str, int]:
    """Return the value as JSON text, and the size of the text in bytes."""
    if not is_flat:
        _refuse_unfit(what, value, depth)
    try:
        text = _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage(_not_json(what, value) or f"the {what} is not JSON: {error}") from error
    if "\\u0000" in text:
        # A NUL, perhaps one that the encoder has made of a lazy text; or a backslash before "u0000".
        _refuse_unfit(what, json.loads(text), depth)
    try:
        return text, len(text.encode())
    except UnicodeEncodeError:
        raise InvalidMessage(_not_json(what, value) or f"the {what} {_SURROGATE}") from None


def _refuse_unfit(what: str, value: Any, depth: int) -> None:
    try:
        _walk(value, depth)
    except _Unfit as unfit:
        raise InvalidMessage(f"{_place(what, unfit.path)} {unfit}") from None


_SURROGATE = "holds a lone surrogate, which no UTF-8 text can"


class _Unfit(Exception):
    """A value is unfit for a payload. The path leads to it, from the innermost step to the outermost."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[Any] = []


_HARMLESS = frozenset({bool, type(None)})
_HARMLESS_WHEN_FLAT = _HARMLESS | {str}
_NUMBERS = frozenset({int, float})


def _is_flat(value: Any) -> bool:
    """Tell whether a value is, as most payloads are, a dict of texts, numbers and the like that JSON keeps as they are.

    This is quicker than ``_walk``, which could find nothing wrong with such a value but a NUL.
    """
    if type(value) is not dict:
        return False
    for name, item in value.items():
        kind = type(item)
        if type(name) is not str:
            return False
        if kind not in _HARMLESS_WHEN_FLAT and not (kind in _NUMBERS and -(2**63) <= item < 2**63):
            return False
    return True


def _walk(value: Any, depth: int) -> None:
    """Refuse values that json.dumps would take and a database would refuse or change silently."""
    if type(value) in _HARMLESS:
        return
    if isinstance(value, str):
        if "\x00" in value:
            raise _Unfit("holds a NUL character, which PostgreSQL cannot store")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise _Unfit("holds an integer of more than 64 bits; send it as a string")
    elif isinstance(value, float):
        # It would be refused when it is sent on.
        if not -(2**63) <= value < 2**63 and isfinite(value):
            raise _Unfit("holds a float of 2**63 or more, which PostgreSQL returns as an integer; send it as a string")
    elif isinstance(value, (dict, Mapping)):
        if depth < 1:
            raise _Unfit("is nested too deep")
        if isinstance(value, MultiValueDict):
            raise _Unfit(
                f"is a {type(value).__name__}, of which JSON keeps only the last value of each name; pass its .dict()"
                " for that, or dict(….lists()) for all values"
            )
        for name, item in value.items():
            if not isinstance(name, str):
                raise _Unfit(f"has a key that is not a string: {shown(name)}")
            if "\x00" in name:
                raise _Unfit("has a key with a NUL character, which PostgreSQL cannot store")
            try:
                _walk(item, depth - 1)
            except _Unfit as unfit:
                unfit.path.append(name)
                raise
    elif isinstance(value, list | tuple):
        if depth < 1:
            raise _Unfit("is nested too deep")
        for item in value:
            try:
                _walk(item, depth - 1)
            except _Unfit as unfit:
                unfit.path.append(next(number for number, one in enumerate(value) if one is item))
                raise


def _not_json(what: str, value: Any, path: tuple[Any, ...] = ()) -> str | None:
    """Say which part of a value the encoder refuses, and what to pass instead; return None when it refuses none."""
    if isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (_not_json(what, part, (step, *path)) for step, part in parts)), None)
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return f"{_place(what, path)} {_SURROGATE}"
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ValueError):
            return f"{_place(what, path)} is not JSON: {error}"
        hint = _instead(value)
        return f"{_place(what, path)} is of type {type(value).__name__}, which is not JSON{hint and f'; pass {hint}'}"
    return None


# What to pass instead of objects of these types, or with these attributes. The first that fits counts.
_OF_TYPES: tuple[tuple[Any, str], ...] = (
    (QuerySet, 'a list: list(queryset.values_list("pk", flat=True))'),
    (Enum, "its .value"),
    (bytes | bytearray | memoryview, "text, such as value.decode() or base64"),
    (PurePath, "str(value)"),
)
_OF_ATTRIBUTES = {
    "pk": "its pk",
    "model_dump": 'value.model_dump(mode="json")',
    "__dataclass_fields__": "dataclasses.asdict(value)",
    "__attrs_attrs__": "attrs.asdict(value)",
}


def _instead(value: Any) -> str:
    """Return what to pass instead of an object that is not JSON, as far as that can be told."""
    name = type(value).__name__
    if isinstance(value, type) or inspect.isroutine(value):
        return "data; it was perhaps to be called"
    if hint := next((hint for kinds, hint in _OF_TYPES if isinstance(value, kinds)), None):
        return hint
    if hint := next((hint for attribute, hint in _OF_ATTRIBUTES.items() if hasattr(value, attribute)), None):
        return hint
    if isinstance(value, Mapping):
        return "a dict"
    if isinstance(value, Set | MappingView | Iterator | Sequence):
        return "a list"
    return f"a dict of what is needed of the {name}"


def _place(what: str, path: Sequence[Any]) -> str:
    """Return the place of a value as Python writes it: ``payload['orders'][0]``."""
    steps = [f"[{shown(step)}]" for step in reversed(path)]
    if len(steps) > _STEPS_SHOWN:
        steps[_STEPS_SHOWN:] = ["[…]"]
    return what + "".join(steps) if steps else f"the {what}"


# The most steps that an error shows of the path to a value inside of a payload.
_STEPS_SHOWN = 8
