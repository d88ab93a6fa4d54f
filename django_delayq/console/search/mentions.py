"""Finds the messages of all states that have a number or an e-mail address in key or payload. No index has these."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from django.db.models import Q, QuerySet, TextField
from django.db.models.functions import Cast
from django.utils.translation import gettext as _

from ...models import Message
from ..console_tuning import timeouts, tuning
from ..statements import in_time
from .conditions import small

# Shows a payload as its reader may see it.
Shown = Callable[[Any], Any]

_NUMBER = re.compile(r"\d+")


def holders(using: str, text: str, shown: Shown) -> tuple[set[int], str]:
    """Return the ids of messages with the text as a whole part of the key, or as a value in the payload; and a note.

    Keys that differ from those of the newest messages by their number alone are found in the index, whatever their age;
    else the newest messages are read, and payloads only if they are not large. The note says which part was read; it is
    empty when all was read.
    """
    rows, values = Message.objects.using(using).order_by("-pk"), {"text": text, "count": f"{tuning.nearest_rows:,}"}
    found = set(in_time(using, timeouts.beside, _by_key, rows, text) or ())
    read = in_time(using, timeouts.beside, _among_newest, rows, text)
    if read is None:
        return found, _("Payloads could not be searched for %(text)s in time.") % values
    newest, has_older = read
    other = r"\d" if text.isdigit() else r"\w"
    part = re.compile(f"(?<!{other}){re.escape(text)}(?!{other})")
    found.update(pk for pk, key, content in newest if part.search(key or "") or text in _scalars(shown(content)))
    note = _(
        "For %(text)s, only the payloads of the newest %(count)s messages were searched. payload.NAME: searches all."
    )
    return found, note % values if has_older else ""


def _by_key(rows: QuerySet[Message], text: str) -> list[int]:
    newest = rows.filter(pk__in=rows.values("pk")[: tuning.keys_read]).values_list("key", flat=True)
    like = {_NUMBER.sub(text, key) for key in newest if key and text.isdigit() and len(_NUMBER.findall(key)) == 1}
    return list(rows.filter(key__in={text, *like}).values_list("pk", flat=True)[: tuning.term_ids // 2])


def _among_newest(rows: QuerySet[Message], text: str) -> tuple[list[tuple[int, str | None, Any]], bool]:
    """Return id, key and payload of the newest messages that have the text in these; and whether others are older."""
    older = next(iter(rows.values_list("pk", flat=True)[tuning.nearest_rows : tuning.nearest_rows + 1]), 0)
    newest = rows.filter(pk__gt=older).annotate(text=Cast(small(tuning.small_payload), TextField()))
    # SQLite keeps letters beyond ASCII as JSON escapes them.
    mentions = Q(key__contains=text) | Q(text__contains=text) | Q(text__contains=json.dumps(text)[1:-1])
    return list(newest.filter(mentions).values_list("pk", "key", "payload")[: tuning.term_ids // 2 - 1]), older > 0


def _scalars(content: Any) -> Iterator[str]:
    """Yield the values in a payload, as text."""
    if isinstance(content, dict | list):
        for inner in content.values() if isinstance(content, dict) else content:
            yield from _scalars(inner)
    else:
        yield str(content)
