"""Rows written past the guards of the models, to bring them into states that no call makes; and no handlers."""

from __future__ import annotations

from typing import TypeVar

from django.db.models import Manager, Model

from django_delayq.project import registry

Row = TypeVar("Row", bound=Model)


def unguarded(model: type[Row]) -> Manager[Row]:
    """Return a manager whose rows a test may create, update and delete at will."""
    return model._base_manager


def forget_handlers() -> None:
    """Forget the handlers of this process, as one that has none. They are there again for the next test."""
    for topic in registry.handlers():
        registry.unregister(topic)
