"""The table of overrides: limits that somebody changed at run time."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..core import bounds, limits, verbs
from .fields import UTCDateTimeField
from .queue import RecordNow


class LimitOverride(models.Model):
    """The override of a limit, which replaces the declaration in the code. A limit without a row is as declared.

    Each change replaces the row by a new one; that of a reset is over at once. So a greater id tells a worker to read
    the rows again.
    """

    # The overrides that are in force, by the database's clock. The row of a reset ends when it begins: SQLite's clock
    # counts whole ms, and would otherwise find it in force for the rest of a millisecond.
    IN_FORCE = Q(until__isnull=True) | (Q(until__gt=RecordNow()) & Q(until__gt=F("since")))

    # The name of the limit: ``limits.topic_name`` or ``limits.queue_name``.
    name = models.CharField(_("name"), max_length=bounds.LENGTHS.limit, unique=True)
    # NULL or empty: as the code declares it. A limit of 0 lets no delivery begin.
    limit = models.PositiveIntegerField(_("limit"), null=True, blank=True)
    rate = models.CharField(_("rate"), max_length=bounds.LENGTHS.rate, default="", blank=True)
    burst = models.PositiveIntegerField(_("burst"), null=True, blank=True)
    since = UTCDateTimeField(_("since"), default=timezone.now)
    # The time at which the override ends by itself; NULL: it lasts until somebody resets the limit.
    until = UTCDateTimeField(_("until"), null=True, blank=True)
    set_by = models.CharField(_("set by"), max_length=200, default="", blank=True)
    reason = models.TextField(_("reason"), default="", blank=True)

    class Meta:
        db_table = "delayq_limit_override"
        verbose_name = _("limit override")
        verbose_name_plural = _("limit overrides")
        default_permissions = ()
        permissions: ClassVar = verbs.permissions("limit")

    def __str__(self) -> str:
        return self.name

    @property
    def is_pause(self) -> bool:
        """True when no delivery begins under the limit."""
        return self.limit == 0

    def over(self, declared: limits.Limit | None) -> limits.Limit:
        """Return the limit that holds where the code declares this one."""
        return limits.override(declared, self.limit, self.rate, self.burst)
