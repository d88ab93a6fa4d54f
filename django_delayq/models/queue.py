"""The table of paused queues."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.db.models import DateTimeField, Q, Value
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..core import bounds, in_tests, verbs
from .fields import UTCDateTimeField


class RecordNow(Now):
    """The time by the record's clock, in a queryset."""

    def resolve_expression(self, *args: Any, **kwargs: Any) -> Any:
        if in_tests.clock is not None:
            return Value(in_tests.clock(), output_field=DateTimeField()).resolve_expression(*args, **kwargs)
        return super().resolve_expression(*args, **kwargs)


class Queue(models.Model):
    """A queue that somebody paused: its messages wait. A queue without a row is not paused."""

    # The condition that a pause is not over, by the database's clock.
    PAUSED = Q(resumes_at__isnull=True) | Q(resumes_at__gt=RecordNow())

    name = models.CharField(_("name"), max_length=bounds.LENGTHS.queue, primary_key=True)
    paused_at = UTCDateTimeField(_("paused"), default=timezone.now)
    # The time at which the pause ends by itself; NULL: it lasts until somebody resumes the queue.
    resumes_at = UTCDateTimeField(_("resumes"), null=True, blank=True)
    paused_by = models.CharField(_("paused by"), max_length=200, default="", blank=True)
    reason = models.TextField(_("reason"), default="", blank=True)

    class Meta:
        db_table = "delayq_queue"
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        default_permissions = ()
        permissions: ClassVar = verbs.permissions("queue")

    def __str__(self) -> str:
        return self.name


def in_paused_queue(using: str | None = None) -> Q:
    """Return the condition that the queue of a message is paused. Without ``using`` it goes for any database."""
    return Q(queue__in=Queue.objects.using(using).filter(Queue.PAUSED).values("name"))
