"""Asks in the log of a project under development about names that are probably typing errors."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from ..core import names, once
from ..project import registry

logger = logging.getLogger("django_delayq")


def ask(what_happens: str, topic: str, queue: str = "") -> None:
    """Log a topic or a queue that no code here names, if it is like one that some code names."""
    handlers = registry.handlers()
    _ask(what_happens, "topic", topic, handlers, {one.name: topic for topic, one in handlers.items()})
    if queue:
        ask_about_queue(what_happens, queue)


def ask_about_queue(what_happens: str, queue: str) -> None:
    """Log a queue that no code here names, if it is like one that some code names."""
    _ask(what_happens, "queue", queue, registry.queues(), {})


def _ask(what_happens: str, what: str, name: str, known: Collection[str], functions: Mapping[str, str]) -> None:
    """``functions`` has the topics of handlers by the names of their functions."""
    if name in known or (what, name) in once.logged:
        return
    like = functions.get(name) or names.near(name, known)
    if like is not None and once.is_first(what, name):
        text = "%s the %s %s, which no code here names. Did you mean %s?"
        logger.warning(text, what_happens, what, name, like)
