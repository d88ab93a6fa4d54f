"""A bare row, and the effect of a transactional handler. Tables without migrations: ``migrate --run-syncdb``."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Row(models.Model):
    """A message as one row: scheduling it by the ORM alone is the reference."""

    topic = models.CharField(max_length=100)
    payload = models.JSONField()
    due_at = models.DateTimeField()
    done = models.BooleanField(default=False)

    # Declared for mypy: its Django has the demo's settings, and this app is not in them.
    objects: ClassVar[models.Manager[Row]] = models.Manager()

    class Meta:
        indexes: ClassVar = [models.Index(fields=["due_at"], name="bench_todo", condition=models.Q(done=False))]

    def __str__(self) -> str:
        return f"{self.topic} #{self.pk}"


class Effect(models.Model):
    """A row that a handler writes, in the table that the handlers of peers write to."""

    number = models.BigIntegerField()
    payload = models.JSONField()

    objects: ClassVar[models.Manager[Effect]] = models.Manager()

    class Meta:
        db_table = "bench_effect"

    def __str__(self) -> str:
        return str(self.number)
