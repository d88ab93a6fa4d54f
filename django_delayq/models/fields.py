"""The type of all times in the tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.db import models

if TYPE_CHECKING:
    # mypy's plugin knows this class. At runtime it is not generic.
    UTCDateTimeField = models.DateTimeField
else:

    class UTCDateTimeField(models.DateTimeField):
        """A time that is read in UTC, whatever time zone the database session has.

        Python computes with aware datetimes of one zone as if its clocks were never changed: there a day that begins
        summer time has 24 hours. In UTC seconds are seconds.
        """

        def get_db_converters(self, connection: Any) -> list[Any]:
            return [] if connection.timezone is UTC else [_in_utc]

        def deconstruct(self) -> tuple[Any, ...]:
            name, _path, arguments, options = super().deconstruct()
            return name, "django.db.models.DateTimeField", arguments, options


def _in_utc(value: datetime | None, expression: object, connection: object) -> datetime | None:
    return None if value is None else value.astimezone(UTC)
