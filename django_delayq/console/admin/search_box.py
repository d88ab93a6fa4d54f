"""The search of a request: the tab and the search box of the list, and what the user may not search for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from django.contrib.admin.views.main import SEARCH_VAR
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...core.states import LIVE, State
from ...core.verbs import VERBS
from ...record import reads
from ..search.conditions import ALL_STATES
from ..search.language import Search, parse
from . import page, payload

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as Text

TAB_VAR = "state"
# Set to 1 for a search that may take longer.
LONGER_VAR = "longer"

# Stands in the empty search box.
EXAMPLES = "order-17, topic:mail.*, error:Timeout, due:<1h"
HELP = (
    ("12345", _("an id, or a number in keys and payloads; #12345 is an id only")),
    ("order-17", _("a key, or else a topic")),
    ("key:order-17", _("a key, in every state")),
    ("topic:mail.*", _("a topic, or every topic that begins with this")),
    ("queue:mails", _("a queue")),
    ("state:dead,expired", _("states")),
    ("is:overdue", _("also is:paused, is:limited, is:retrying, is:live, is:finished")),
    ("due:<1h", _("due before an hour from now; also due:>2d, due:today, due:2026-01-02..2026-01-03")),
    ("late:5m", _("waiting, more than 5 minutes after its due time; also in a paused queue")),
    ("finished:24h", _("finished within the last day; created: works the same way")),
    ("attempts:>3", _("failed more than three times")),
    ("error:Timeout", _("the last error contains this")),
    ("worker:web-1", _("running on a worker whose name begins with this")),
    ('limit:"queue mails"', _("waiting for this limit")),
    ("limit_key:c-1", _("a limit key")),
    ("operation:5", _("an operation")),
    ("payload.order.id:42", _("a value in the payload")),
    ("header.tenant:acme", _("a value in the headers")),
    ('key:"two words"', _("quotation marks around a value with blanks")),
)


@dataclass(frozen=True, slots=True)
class Tab:
    """A tab of the list. ``text`` is the search that the tab adds to the one in the box."""

    name: str
    label: Text
    text: str
    states: frozenset[State]
    # Shown when the tab has no messages.
    empty: Text


TABS = (
    Tab("live", _("Live"), "is:live", LIVE, _("Nothing is scheduled or running.")),
    Tab("all", _("All"), "", ALL_STATES, _("There are no messages yet.")),
    Tab("scheduled", _("Scheduled"), "state:scheduled", frozenset({State.SCHEDULED}), _("Nothing is scheduled.")),
    Tab("overdue", _("Overdue"), "is:overdue", frozenset({State.SCHEDULED}), _("Nothing is overdue.")),
    Tab("paused", _("Paused"), "is:paused", frozenset({State.SCHEDULED}), _("No due message is in a paused queue.")),
    Tab("limited", _("Limited"), "is:limited", frozenset({State.SCHEDULED}), _("Nothing waits for a limit.")),
    Tab("retrying", _("Retrying"), "is:retrying", frozenset({State.SCHEDULED}), _("Nothing is tried again.")),
    Tab("running", _("Running"), "state:running", frozenset({State.RUNNING}), _("Nothing is running.")),
    Tab("consumed", _("Consumed"), "state:consumed", frozenset({State.CONSUMED}), _("Nothing was consumed.")),
    Tab("dead", _("Dead"), "state:dead", frozenset({State.DEAD}), _("Nothing is dead.")),
    Tab("cancelled", _("Cancelled"), "state:cancelled", frozenset({State.CANCELLED}), _("Nothing was cancelled.")),
    Tab("expired", _("Expired"), "state:expired", frozenset({State.EXPIRED}), _("Nothing expired.")),
)
_BY_NAME = {tab.name: tab for tab in TABS}


@dataclass(frozen=True, slots=True)
class RequestedSearch:
    """The search that a request asks for."""

    tab: Tab
    # The search of the box alone, and together with that of the tab.
    box: Search
    whole: Search
    # True when the search reads masked values: the user may do that, and each time it is an audit event.
    reveals: bool = False

    @property
    def query(self) -> str:
        """The search as a query string."""
        return urlencode({TAB_VAR: self.tab.name, **({SEARCH_VAR: self.box.text} if self.box.text else {})})


def read_search(request: HttpRequest, given: Mapping[str, str], using: str) -> RequestedSearch:
    """Read the search from ``given``: the query string, or the fields of a form.

    A search for what is masked is written to the audit.
    """
    now = reads.now(using)
    box = parse(given.get(SEARCH_VAR, ""), now=now).resolved(using, payload.redacted)
    secret = sorted(name for name in box.payload_names if payload.is_secret(name))
    if secret and not request.user.has_perm(VERBS["reveal"].permission):
        text = gettext("The values of %(names)s are masked, so you may not search for them.")
        box = replace(box, problems=(*box.problems, text % {"names": ", ".join(secret)}))
    reveals = bool(secret) and not box.problems
    if reveals:
        page.record(request, "reveal", box.described)
    # A search that names states or single messages is not narrowed to live messages.
    default = "all" if box.selective or box.states != ALL_STATES else "live"
    tab = _BY_NAME.get(given.get(TAB_VAR, ""), _BY_NAME[default])
    return RequestedSearch(tab, box, parse(tab.text, now=now) & box, reveals)
