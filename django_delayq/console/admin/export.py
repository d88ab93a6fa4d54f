"""The export of what a search finds, as CSV or JSON lines: read in batches, redacted, and written to the audit."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from io import StringIO
from typing import Any

from django.contrib import messages
from django.core.exceptions import BadRequest
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase, HttpResponseRedirect, StreamingHttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from ...models import Message
from ..console_tuning import timeouts, tuning
from ..search.listing import Listing
from ..statements import TooSlow
from . import page, payload, search_box
from .readonly import ReadOnly

# The columns that are redacted.
_JSON_FIELDS = ("payload", "headers", "result")
_FIELDS = (
    *("id", "topic", "queue", "key", "limit_key", "state", "priority", "due_at", "created_at", "expires_at"),
    *("finished_at", "attempts", "max_attempts", "timeout", "lease", "deliveries", "worker", "error"),
    *_JSON_FIELDS,
)
# A spreadsheet takes a cell that begins with one of these for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


class ExportView(ReadOnly):
    """The view that exports."""

    def export_view(self, request: HttpRequest) -> HttpResponseBase:
        """Send a file of what a search finds, on POST of its tab, its text and ``format``."""
        self.require(request, "export")
        if request.method != "POST":
            return HttpResponseRedirect(self.url(Message))
        form = _FORMATS.get(request.POST.get("format", ""))
        if form is None:
            raise BadRequest("format")
        rows = self.get_queryset(request)
        asked = search_box.read_search(request, request.POST, rows.db)
        if asked.box.problems:
            return self._refused(request, asked, " ".join(asked.box.problems))
        try:
            ids = Listing(rows, asked.whole).ids(tuning.exported + 1, milliseconds=timeouts.long)
        except TooSlow:
            return self._refused(request, asked, _("The search took too long: nothing was exported. Narrow it."))
        masked = not self.may(request, "reveal")
        target = _("%(messages)s, as %(format)s") if masked else _("%(messages)s, as %(format)s, unmasked")
        target %= {"messages": asked.whole.described, "format": request.POST["format"]}
        page.record(request, "export", target, outcomes={"exported": min(len(ids), tuning.exported)})
        lines, content_type = form
        found = lines(_read(rows, ids, masked=masked), len(ids) > tuning.exported)
        response = StreamingHttpResponse(found, content_type)
        at = timezone.localtime().strftime("%Y%m%d-%H%M%S")
        response["Content-Disposition"] = f'attachment; filename="messages-{at}.{request.POST["format"]}"'
        return response

    def _refused(self, request: HttpRequest, asked: search_box.RequestedSearch, text: str) -> HttpResponseBase:
        return self.leave(request, f"{self.url(Message)}?{asked.query}", text, messages.ERROR)


def _read(rows: QuerySet[Message], ids: Sequence[int], *, masked: bool) -> Iterator[dict[str, Any]]:
    """Read the messages in the order of the list, without those that were purged meanwhile."""
    for start in range(0, min(len(ids), tuning.exported), tuning.export_batch):
        batch = ids[start : min(start + tuning.export_batch, tuning.exported)]
        found = {row["id"]: row for row in rows.filter(pk__in=batch).values(*_FIELDS)}
        for pk in batch:
            if pk in found:
                row = found[pk]
                if masked:
                    row.update({name: payload.redacted(row[name]) for name in _JSON_FIELDS})
                yield row


def _text(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _truncated() -> str:
    return _("Only the first %(cap)s messages: there are more.") % {"cap": f"{tuning.exported:,}"}


def _jsonl(rows: Iterator[dict[str, Any]], truncated: bool) -> Iterator[str]:
    for row in rows:
        yield json.dumps({name: _text(value) for name, value in row.items()}, ensure_ascii=False) + "\n"
    if truncated:
        yield json.dumps({"truncated": _truncated()}, ensure_ascii=False) + "\n"


def _csv(rows: Iterator[dict[str, Any]], truncated: bool) -> Iterator[str]:
    yield _line(_FIELDS)
    for row in rows:
        row.update({name: payload.compact(row[name], masked=False) for name in _JSON_FIELDS})
        yield _line([_safe(_text(row[name])) for name in _FIELDS])
    if truncated:
        yield _line([_truncated()])


def _line(cells: Sequence[Any]) -> str:
    line = StringIO()
    csv.writer(line).writerow(cells)
    return line.getvalue()


def _safe(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


_FORMATS: dict[str, tuple[Callable[[Iterator[dict[str, Any]], bool], Iterator[str]], str]] = {
    "csv": (_csv, "text/csv; charset=utf-8"),
    "jsonl": (_jsonl, "application/x-ndjson; charset=utf-8"),
}
