"""The messages of an object in its own page of the admin: those to come, those of the past, and *cancel*."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import unquote
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from .site import load

FIELD = "delayq_timeline"


class DelayqTimeline:
    """For an admin of your own model: ``class OrderAdmin(DelayqTimeline, ModelAdmin)``.

    ``delayq_key`` is the key of the object's messages, with fields of the object in braces: ``"order-{pk}"``. Override
    ``get_delayq_key`` where that is not enough. Users see the messages with ``delayq.view_message``, and cancel one
    with ``delayq.cancel_message``.
    """

    delayq_key = ""

    def get_delayq_key(self, obj: Any) -> str:
        """Return the key of the messages of an object."""
        return self.delayq_key.format_map(_Fields(obj))

    def delayq_timeline(self, obj: Any) -> SafeString:
        """Return the messages of an object as a page shows them."""
        shown: SafeString = load("show_timeline")(self, obj)
        return shown

    delayq_timeline.short_description = _("Messages")  # type: ignore[attr-defined]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        own: Any = super().get_readonly_fields(request, obj)  # type: ignore[misc]
        if obj is None or not request.user.has_perm("delayq.view_message"):
            return own
        # The field is made from the object alone.
        obj.delayq_may_cancel = request.user.has_perm("delayq.cancel_message")
        return [*own, FIELD]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return [name for name in super().get_fields(request, obj) if name != FIELD]  # type: ignore[misc]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        own: Any = super().get_fieldsets(request, obj)  # type: ignore[misc]
        is_shown = FIELD in self.get_readonly_fields(request, obj)
        return [*own, (None, {"fields": [FIELD]})] if is_shown else own

    def get_urls(self) -> list[URLPattern]:
        site: Any = self.admin_site  # type: ignore[attr-defined]
        route = path("<path:object_id>/delayq/<int:message>/cancel/", site.admin_view(self._cancel))
        return [route, *super().get_urls()]  # type: ignore[misc]

    def _cancel(self, request: HttpRequest, object_id: str, message: int) -> HttpResponseBase:
        obj: Any = self.get_object(request, unquote(object_id))  # type: ignore[attr-defined]
        answer: HttpResponseBase = load("cancel_from_timeline")(self, request, obj, message)
        return answer


class _Fields(dict[str, Any]):
    """The fields of an object by their names."""

    def __init__(self, obj: Any) -> None:
        super().__init__()
        self._obj = obj

    def __missing__(self, name: str) -> Any:
        return getattr(self._obj, name)
