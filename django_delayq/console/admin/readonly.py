"""The base of all pages: their addresses, and who may do what. No page adds, changes or deletes rows, or counts all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.http.response import HttpResponseBase
from django.urls import NoReverseMatch, URLPattern, path, reverse
from django.utils.translation import gettext as _

from ...core.outcomes import storable
from ...core.verbs import VERBS
from ...models import Message, Queue
from ...project import console_conf
from ..models import DeadLetters, Health, Limits, Operation, Topics


class CappedCount(int):
    """The number of rows where the count stopped at the cap, written as "10,000+"."""

    def __str__(self) -> str:
        # Templates that put separators in themselves would garble "10,000+".
        return f">{int(self)}" if settings.USE_THOUSAND_SEPARATOR else f"{int(self):,}+"


def _unsent(request: HttpRequest) -> str:
    """Return the query string, with the fields of a form that are kept until its user has logged in again.

    If the form answers no question, few fields are kept: others may be secret, and this becomes an address. The ids
    that a question has found would be too many for one, and are found again.
    """
    names = list(request.POST) if "token" in request.POST else ["reason", "search", "ids"]
    fields = ((name, request.POST.get(name, "")[:KEPT]) for name in names if name not in _DROPPED)
    query = request.GET.copy()
    query[UNSENT_VAR] = urlencode({name: value for name, value in fields if value or name in request.POST})
    return query.urlencode()


View = Callable[..., HttpResponseBase]
# The address of what a search finds: ``ReadOnly.list_url`` of a page.
Links = Callable[..., str]

# The routes of pages besides those of Django's admin: each leads to the view of the same name.
ROUTES: Mapping[type[Model], Mapping[str, str]] = {
    Message: {
        "changelist": "",
        "export": "export/",
        "reveal": "<int:pk>/reveal/",
        "restore": "<int:pk>/restore/",
        "repeat": "<int:pk>/repeat/",
        "action": "action/<slug:name>/",
    },
    DeadLetters: {"acknowledge": "acknowledge/"},
    Topics: {"detail": "<path:topic>/detail/"},
    Queue: {"detail": "<str:queue>/detail/", "pause": "<str:queue>/pause/", "resume": "<str:queue>/resume/"},
    Limits: {"override": "override/", "reset": "reset/"},
    Health: {"check": "check/", "restore": "restore/"},
    Operation: {"stop": "<int:number>/stop/", "resume": "<int:number>/resume/", "undo": "<int:number>/undo/"},
}
# A parameter in the address to which the login leads back, for a form that was sent after the session had ended.
UNSENT_VAR = "unsent"
# Each field of such a form is kept up to this many characters: they go into an address.
KEPT = 1000
_DROPPED = frozenset({"csrfmiddlewaretoken", "found"})


def url_name(model: type[Model], view: str) -> str:
    """Return the name of a model's page within the admin."""
    return f"{model._meta.app_label}_{model._meta.model_name}_{view}"


class ReadOnly(admin.ModelAdmin):  # type: ignore[type-arg]
    """Refuses to add, change and delete."""

    list_per_page = 50
    # Most columns have no index to sort by.
    sortable_by: ClassVar[list[str] | tuple[str, ...] | tuple[()] | None] = ()

    def may(self, request: HttpRequest, *verbs: str) -> bool:
        """Tell whether the user may view the page and has the permissions for these ``VERBS``."""
        needed = [VERBS[name] for name in verbs]
        if console_conf.get().READ_ONLY and any(verb.changes for verb in needed):
            return False
        return self.has_view_permission(request) and request.user.has_perms([verb.permission for verb in needed])

    def require(self, request: HttpRequest, *verbs: str) -> None:
        """Raise ``PermissionDenied`` unless the user ``may``."""
        if not self.may(request, *verbs):
            raise PermissionDenied

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Tell whether the user may view the page. One without a permission of its own needs that to view messages."""
        model = self.model if "view" in self.opts.default_permissions else Message
        return request.user.has_perm(f"{model._meta.app_label}.view_{model._meta.model_name}")

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Find the row of an address, which may have characters that PostgreSQL does not take."""
        return super().get_object(request, storable(object_id), from_field)

    @property
    def using(self) -> str:
        """The database that messages and all that belongs to them are written to."""
        return router.db_for_write(Message)

    def url(self, model: type[Model], view: str = "changelist", *args: object) -> str:
        """Return the address of a model's page on the same site, "" when the site does not have it."""
        try:
            return reverse(f"admin:{url_name(model, view)}", args=args, current_app=self.admin_site.name)
        except NoReverseMatch:
            return ""

    def list_url(self, model: type[Model], query: str = "", **more: str) -> str:
        """Return the address of what a search finds; ``state="all"`` finds messages in every state."""
        url = self.url(model)
        return f"{url}?{urlencode({'q': query, **more})}" if url and query else url

    def leave(self, request: HttpRequest, url: str, text: str, level: int) -> HttpResponse:
        """Lead to another page, which shows the text."""
        self.message_user(request, text, level)
        return HttpResponseRedirect(url)

    def resend(self, request: HttpRequest, form: QueryDict, *args: Any, **kwargs: Any) -> HttpResponse:
        """Answer a form that was sent when the session had ended, now that its user has logged in again."""
        if reason := form.get("reason"):
            messages.info(request, _("The reason that you gave: “%(reason)s”") % {"reason": reason})
        return HttpResponseRedirect(
            self.list_url(Message, str(form["search"]), state="all") if "search" in form else request.get_full_path()
        )

    def get_urls(self) -> list[URLPattern]:
        routes = ROUTES.get(self.model, {}).items()
        ours = [path(route, self._served(f"{name}_view"), name=url_name(self.model, name)) for name, route in routes]
        return [*ours, *super().get_urls()]

    def view(self, name: str) -> View:
        """Return the view of this name."""
        view: View = getattr(self, name)
        return view

    def _served(self, name: str) -> View:
        """Return a view as the site serves it: to its users only, with protection from CSRF.

        A form that arrives when the session has ended is lost with the login. The page after the login says so, and has
        the search and the reason that were in the form.
        """
        site = self.admin_site
        served: View = site.admin_view(self.view(name))

        def inner(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            if request.method == "POST" and not site.has_permission(request):
                # The login leads back to the full path of the request.
                request.META["QUERY_STRING"] = _unsent(request)
            elif UNSENT_VAR in request.GET and site.has_permission(request):
                text = _("Nothing was done: your session had ended before the form was sent. Please do it again.")
                messages.warning(request, text)
                query = request.GET.copy()
                form = QueryDict(query.pop(UNSENT_VAR)[-1])
                request.META["QUERY_STRING"] = query.urlencode()
                request.GET = QueryDict(request.META["QUERY_STRING"])
                return self.view("resend")(request, form, *args, **kwargs)
            return served(request, *args, **kwargs)

        return inner
