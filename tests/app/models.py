"""The table of effects that the handlers of the tests write."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Effect(models.Model):
    """One thing done by one delivery of a message."""

    message_id = models.BigIntegerField()
    delivery = models.IntegerField()
    note = models.CharField(max_length=200, default="", blank=True)
    at = models.DateTimeField(auto_now_add=True)

    # mypy needs this: it reads the demo's settings, in which this app is not installed.
    objects: ClassVar[models.Manager[Effect]] = models.Manager()

    def __str__(self) -> str:
        return f"message {self.message_id}, delivery {self.delivery}: {self.note}"
