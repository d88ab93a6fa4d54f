"""The base of all pages: none of them may add, change or delete rows, or count all of them. Here is who may do what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin import ShowFacets
from django.http import HttpRequest

from ...core.verbs import VERBS
from ...project import console_conf
from .paginator import CappedPaginator


class ReadOnly(admin.ModelAdmin):  # type: ignore[type-arg]
    """Refuses to add, change and delete, and limits what a list reads."""

    paginator: ClassVar[type] = CappedPaginator
    list_per_page = 50
    # There is no "show all", which would read and render every row.
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = ShowFacets.NEVER
    # Most columns have no index to sort by.
    sortable_by: ClassVar[list[str] | tuple[str, ...] | tuple[()] | None] = ()
    view_on_site: Callable[[Any], str | None] | bool = False

    def may(self, request: HttpRequest, *verbs: str) -> bool:
        """Tell whether the user may view the page and has the permissions for these ``VERBS``."""
        needed = [VERBS[name] for name in verbs]
        if console_conf.get().READ_ONLY and any(verb.changes for verb in needed):
            return False
        return self.has_view_permission(request) and request.user.has_perms([verb.permission for verb in needed])

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
