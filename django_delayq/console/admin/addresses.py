"""Searches in payloads for an e-mail address, which is seldom a key and never a topic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.db.models import QuerySet

from ...models import Message
from ..search.payloads import small
from ..search.texts import payload_text
from ..statements import in_time
from . import payload

# The names in the payloads of this many newest messages are offered.
MESSAGES_READ = 300
# Larger payloads are not looked at.
SMALL_BYTES = 4096
# The statement that looks at them is stopped after this time.
TIMEOUT_MS = 300
# At most this many searches are offered.
MOST = 5
# A path that is offered has at most this many names.
DEEPEST = 5


def is_address(text: str) -> bool:
    """Tell whether a text looks like an e-mail address."""
    name, at, host = text.partition("@")
    return bool(at and name and "." in host) and not any(character.isspace() for character in text)


def searches(rows: QuerySet[Message], address: str) -> list[str]:
    """Return the texts of searches for the address under the paths where the newest payloads have addresses.

    When they have none, it is an example.
    """
    paths: Counter[tuple[str, ...]] = Counter()
    newest = rows.filter(pk__in=rows.order_by("-id").values("pk")[:MESSAGES_READ]).order_by()
    contents = newest.annotate(small_payload=small(SMALL_BYTES)).values_list("small_payload", flat=True)
    for content in in_time(rows.db, TIMEOUT_MS, lambda: list(contents)) or ():
        paths.update(set(_paths(content)))
    found = sorted(paths, key=lambda path: (-paths[path], path))[:MOST]
    return [payload_text(path, address) for path in found or [("email",)]]


def _paths(content: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(content, dict) and len(above) < DEEPEST:
        for name, inner in content.items():
            # A masked value may not be searched for, and a path has no words for these characters.
            if name and name.isprintable() and not set(name) & {"\\", '"'} and not payload.is_secret(name):
                yield from _paths(inner, (*above, name))
    elif above and isinstance(content, str) and is_address(content):
        yield above
