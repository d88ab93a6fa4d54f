"""A process without handlers."""

from __future__ import annotations

from django_delayq.project import registry


def forget_handlers() -> None:
    """Forget the handlers of this process. They are there again for the next test."""
    for topic in registry.handlers():
        registry.unregister(topic)
