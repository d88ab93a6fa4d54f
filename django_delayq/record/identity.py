"""The identity of a database, as this process knows it: Redis carries it too, so that a wrong Redis is refused."""

from __future__ import annotations

import uuid

from django.db import connections

from ..models.record import Identity

# By alias: the name of the database behind it, which a test runner changes, and its identity.
_known: dict[str, tuple[str, str]] = {}


def identity(using: str) -> str:
    """Return the identity of the database ``using``, which is made when it is first asked for."""
    row, _created = Identity.objects.using(using).get_or_create(id=1)
    learn_identity(using, row.value)
    return str(row.value)


def known_identity(using: str) -> str:
    """Return the identity of the database ``using`` as this process knows it, without a query; "" while unknown."""
    name, value = _known.get(using, ("", ""))
    return value if value and name == str(connections.settings[using]["NAME"]) else ""


def learn_identity(using: str, value: uuid.UUID | None) -> None:
    """Remember the identity that a statement has read. None: the database has none yet."""
    if value is not None:
        _known[using] = (str(connections.settings[using]["NAME"]), str(value))


def forget_identity(using: str) -> None:
    """Have the identity read again: Redis carries another one, and somebody may have emptied the table."""
    _known.pop(using, None)
