"""A table of a project's own with a foreign key to messages, for as long as a test needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.apps import apps
from django.db import connection, models
from django.test.utils import isolate_apps

from django_delayq.models import Message

ON_DELETE: dict[str, Any] = {
    "CASCADE": models.CASCADE,
    "DO_NOTHING": models.DO_NOTHING,
    "PROTECT": models.PROTECT,
    "RESTRICT": models.RESTRICT,
    "SET_NULL": models.SET_NULL,
}


def model(on_delete: Any, **options: Any) -> Any:
    """Return a model of receipts, each of which refers to a message. Nothing registers it for long."""

    class Receipt(models.Model):
        message = models.ForeignKey(Message, on_delete=on_delete, null=True, related_name="+", **options)

        class Meta:
            app_label = "tests_app"
            # A name that has to be quoted.
            db_table = "Tests: receipt"

        def __str__(self) -> str:
            return f"the receipt of {self.message}"

    return Receipt


@contextmanager
def table(on_delete: Any, **options: Any) -> Iterator[Callable[[int], object]]:
    """Make the table, which Django does not know. Gives out a function that makes a message referred to."""
    with isolate_apps("tests.app"):
        receipts = model(on_delete, **options)
    with connection.schema_editor() as editor:
        editor.create_model(receipts)
    try:
        yield lambda pk: receipts.objects.create(message_id=pk)
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(receipts)


@contextmanager
def known_model(on_delete: Any, **options: Any) -> Iterator[None]:
    """Have the project know the model, which has no table."""
    try:
        model(on_delete, **options)
        yield
    finally:
        apps.all_models["tests_app"].pop("receipt", None)
        apps.clear_cache()
