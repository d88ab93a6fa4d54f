"""What no page of the record may do: add, change, delete, or count all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from django.contrib.admin import ShowFacets
from django.http import HttpRequest

from .paginator import CappedPaginator


class ReadOnly:
    """Mix in before ``ModelAdmin``."""

    paginator: ClassVar[type] = CappedPaginator
    list_per_page = 50
    # No "show all": it reads and renders every row.
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = ShowFacets.NEVER
    # Most columns have no index to sort along.
    sortable_by: ClassVar[list[str] | tuple[str, ...] | tuple[()] | None] = ()
    view_on_site: Callable[[Any], str | None] | bool = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
