"""Paginators for large tables, which count no further than a cap."""

from __future__ import annotations

from typing import cast

from django.conf import settings
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.utils.functional import cached_property

# Rows that are counted, paged through, or selected for one action at most.
PAGED_CAP = 10_000


class CappedCount(int):
    """A number of rows that is at least so large, written as "10,000+"."""

    def __str__(self) -> str:
        # Templates that put separators in themselves would garble "10,000+".
        return f">{int(self)}" if settings.USE_THOUSAND_SEPARATOR else f"{int(self):,}+"


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """A paginator whose count reads at most one row more than the cap."""

    @cached_property
    def count(self) -> int:
        rows = cast(QuerySet[Model], self.object_list)
        found = rows.order_by().values("pk")[: PAGED_CAP + 1].count()
        return found if found <= PAGED_CAP else CappedCount(PAGED_CAP)
