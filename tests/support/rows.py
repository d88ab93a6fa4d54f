"""Rows that a test changes past the guard of their model, as a crash or time leaves them; and columns of tables."""

from __future__ import annotations

from typing import TypeVar

from django.db import connection
from django.db.models import Model, QuerySet

M = TypeVar("M", bound=Model)


def unguarded(model: type[M]) -> QuerySet[M]:
    """Return the rows of a model, to be written as only the statements of the package may."""
    return model._base_manager.all()


def columns(table: str) -> set[str]:
    """Return the names of the columns that a table has now."""
    with connection.cursor() as cursor:
        return {column.name for column in connection.introspection.get_table_description(cursor, table)}
