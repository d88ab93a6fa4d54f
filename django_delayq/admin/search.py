"""The search box: exact, along what has an index, never a scan for a substring."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.admin.views.main import SEARCH_VAR
from django.db.models import Q
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

HELP = _(
    "An id (12345), key:…, topic:… or queue:…, all exact; anything else is looked up as a key and as a topic."
    " An id and key:… are found in every state, the rest among the chosen ones."
)

_FIELDS = ("id", "key", "topic", "queue")


@dataclass(frozen=True, slots=True)
class Search:
    """What was asked for. ``field`` is empty for "a key or a topic"."""

    field: str
    text: str

    @property
    def everywhere(self) -> bool:
        """Whether the search names few enough rows to look in every state."""
        return self.field in ("id", "key")

    def condition(self) -> Q | None:
        """None when no message can match."""
        if self.field == "id":
            return Q(pk=int(self.text)) if _is_id(self.text) else None
        if self.field:
            return Q(**{self.field: self.text}) if self.text else None
        return Q(key=self.text) | Q(topic=self.text)


def parse(text: str) -> Search | None:
    """Read the search box; None when it is empty."""
    text = text.strip()
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return Search("id", text)
    field, colon, rest = text.partition(":")
    if colon and field.lower() in _FIELDS:
        return Search(field.lower(), rest.strip())
    return Search("", text)


def of(request: HttpRequest) -> Search | None:
    """The search of a request for the list."""
    return parse(request.GET.get(SEARCH_VAR, ""))


def is_everywhere(request: HttpRequest) -> bool:
    """Whether the list looks in every state unless one is chosen."""
    search = of(request)
    return search is not None and search.everywhere


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19 and int(text) < 2**63
