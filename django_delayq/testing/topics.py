"""Topics in tests: one that no handler receives is mostly a typing error."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from ..core.exceptions import DelayqError
from ..project import registry


class UnknownTopic(DelayqError, LookupError):
    """No handler receives this topic."""


def check(topic: str, elsewhere: Collection[str] = ()) -> str:
    """Return the topic. Raises ``UnknownTopic``, with the nearest names, when no handler here or elsewhere has it."""
    known = {*registry.handlers(), *elsewhere}
    if topic in known:
        return topic
    near = get_close_matches(str(topic), sorted(known), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "no app registers one like it."
    raise UnknownTopic(
        f"no handler receives the topic {topic!r}; {hint}"
        " If another project handles it, say so: delayq.handled_elsewhere(topic)"
    )
