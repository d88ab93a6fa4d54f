"""Rows that a test changes past the guard of their model: as if time had passed, or as a crash leaves them."""

from __future__ import annotations

from typing import TypeVar

from django.db.models import Model, QuerySet

M = TypeVar("M", bound=Model)


def unguarded(model: type[M]) -> QuerySet[M]:
    """Return the rows of a model, to be written as only the statements of the package may."""
    return model._base_manager.all()
