"""Filters with fixed choices: asking the table for its values would read all of it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.contrib.admin import SimpleListFilter
from django.db.models import Q, QuerySet
from django.db.models.expressions import Combinable
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from .. import transitions
from ..models import Message
from ..states import FINAL, State
from . import search

ALL = "all"

_SOONEST_FIRST = ("due_at", "id")
_LAST_FINISHED_FIRST = ("-finished_at", "-id")
_NEWEST_FIRST = ("-id",)


class StateFilter(SimpleListFilter):
    """One state, all, or (the default) what is live."""

    title = _("state")
    parameter_name = "state"

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        super().__init__(request, *args)
        self.everywhere = search.is_everywhere(request)

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [*State.choices, (ALL, _("all"))]

    def choices(self, changelist: Any) -> Iterator[Any]:
        default, *rest = super().choices(changelist)
        default["display"] = _("all, for this search") if self.everywhere else _("live")
        yield default
        yield from rest

    def queryset(self, request: HttpRequest, queryset: QuerySet[Message]) -> QuerySet[Message]:
        chosen = self.value()
        if chosen == ALL or (chosen is None and self.everywhere):
            return queryset
        if chosen is None:
            # An OR, not an IN: each side has a partial index.
            return queryset.filter(Q(state=State.SCHEDULED) | Q(state=State.RUNNING))
        if chosen in FINAL:
            # Said again for the sake of the index on what is finished.
            return queryset.filter(state=chosen, finished_at__isnull=False)
        return queryset.filter(state=chosen)


class DueFilter(SimpleListFilter):
    """What is late, and what comes next. Only scheduled messages are either."""

    title = _("due")
    parameter_name = "due"
    _AHEAD = {"hour": timedelta(hours=1), "day": timedelta(days=1)}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("overdue", _("overdue")), ("hour", _("in the next hour")), ("day", _("in the next day"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Message]) -> QuerySet[Message]:
        chosen = self.value()
        if chosen is None:
            return queryset
        now = transitions.now(queryset.db)
        scheduled = queryset.filter(state=State.SCHEDULED)
        if chosen in self._AHEAD:
            return scheduled.filter(due_at__gte=now, due_at__lt=now + self._AHEAD[chosen])
        return scheduled.filter(due_at__lt=now)


def ordering(request: HttpRequest) -> tuple[str | Combinable, ...]:
    """The order that fits what is asked for: soonest first for the live, else the latest first."""
    state = request.GET.get(StateFilter.parameter_name)
    if request.GET.get(DueFilter.parameter_name):
        return _SOONEST_FIRST
    if state in FINAL:
        return _LAST_FINISHED_FIRST
    if state == ALL or (state is None and search.is_everywhere(request)):
        return _NEWEST_FIRST
    return _SOONEST_FIRST
