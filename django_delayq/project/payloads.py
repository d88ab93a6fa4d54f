"""Typed payloads: calls that schedule check what ``@handler(payload=…)`` says, and its handler gets it converted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import GenericAlias, UnionType
from typing import Any, NamedTuple

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError

from ..core.exceptions import InvalidMessage
from ..core.text import shown
from . import validation
from .answers import Reject

# A type that pydantic knows, or a pair of functions: one makes the payload of JSON values, the other does the reverse.
PayloadLike = type[Any] | GenericAlias | UnionType | tuple[Callable[[Any], Any], Callable[[Any], Any]]

# A function that asks the database raises these when that does not answer: they tell nothing of the payload.
_DATABASE_AWAY = (InterfaceError, OperationalError)


class PayloadType(NamedTuple):
    """``load`` makes of JSON values what the handler gets; ``dump`` does the reverse."""

    # The name of the type, for errors.
    name: str
    load: Callable[[Any], Any]
    dump: Callable[[Any], Any]

    def stored(self, payload: Any) -> tuple[Any, Any]:
        """Return a payload as JSON has it, and as the handler gets it. Raises ``InvalidMessage`` if it does not fit."""
        with self._refusing():
            found = json.loads(validation.payload(self.dump(payload)))
            return found, self.load(found)

    def check(self, payload: Any) -> None:
        """Raise ``InvalidMessage`` for JSON values, such as those of a row, that do not fit."""
        with self._refusing():
            self.load(payload)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (InvalidMessage, *_DATABASE_AWAY):
            raise
        except Exception as error:
            raise InvalidMessage(f"the payload does not fit {self.name}: {error}") from error

    def loaded(self, payload: Any) -> Any:
        """Return the payload of a delivery as its handler gets it. Raises ``Reject`` when it does not fit any more."""
        try:
            return self.load(payload)
        except _DATABASE_AWAY:
            raise
        except Exception as error:
            raise Reject(f"the payload does not fit {self.name}: {error}") from error

    def before(self, function: Callable[[Any], Any], *, batch: bool) -> Callable[[Any], Any]:
        """Return the function of a handler, with the payloads of its messages converted before each call."""
        convert = self._convert_batch if batch else self._convert
        if not iscoroutinefunction(function):
            return wraps(function)(lambda given: function(convert(given)))

        @wraps(function)
        async def call(given: Any) -> Any:
            return await function(convert(given))

        return call

    def _convert(self, message: Any) -> Any:
        message.payload = self.loaded(message.payload)
        return message

    def _convert_batch(self, messages: list[Any]) -> list[Any]:
        """Convert the payloads of a batch, and return the messages that fit. Raises ``Reject`` when none does."""
        fit, refusal = [], None
        for message in messages:
            try:
                fit.append(self._convert(message))
            except Reject as error:
                refusal = error
                message.reject(error.reason)
        if refusal is not None and not fit:
            raise refusal
        return fit


def of(given: PayloadLike | None) -> PayloadType | None:
    """Return the payload type of a handler. Raises ``TypeError`` for what describes none."""
    if given is None:
        return None
    if not isinstance(given, tuple):
        return _by_pydantic(given)
    if [callable(function) for function in given] != [True, True]:
        raise TypeError(f"payload is a type, or a pair of functions (load, dump), not {shown(given)}")
    load, dump = given
    return PayloadType(getattr(load, "__qualname__", "its type"), load, dump)


def _by_pydantic(kind: Any) -> PayloadType:
    try:
        from pydantic import PydanticUserError, TypeAdapter, ValidationError
    except ImportError:
        raise ImproperlyConfigured(
            "payload= with a type needs pydantic: pip install 'django-delayq[pydantic]', "
            "or give it two functions: payload=(load, dump)"
        ) from None
    name = getattr(kind, "__name__", str(kind))
    try:
        adapter: Any = TypeAdapter(kind)
    except (PydanticUserError, AttributeError, NameError) as error:
        raise TypeError(
            f"payload: pydantic knows no such type as {name}; give two functions: payload=(load, dump): {error}"
        ) from error

    def load(value: Any) -> Any:
        try:
            # As JSON, in which a strict model takes a text for a datetime.
            return adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            told = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors(include_url=False)]
            raise ValueError("; ".join(f"{place}: {what}" if place else what for place, what in told)) from error

    return PayloadType(name, load, partial(adapter.dump_python, mode="json", by_alias=True, warnings=False))
