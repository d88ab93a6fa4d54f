"""The table of worker heartbeats."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from .fields import UTCDateTimeField


class Worker(models.Model):
    """The heartbeat of a worker process, which is alive while ``seen_at`` advances."""

    # Statistics and checks take a worker that was not seen for this many seconds for dead.
    ALIVE = 35.0

    name = models.CharField(_("name"), max_length=200, primary_key=True)
    host = models.CharField(_("host"), max_length=100)
    pid = models.IntegerField(_("process id"))
    queues = models.JSONField(_("queues"), default=list)
    # The topics that the process has handlers for; empty when it runs none.
    topics = models.JSONField(_("topics"), default=list)
    threads = models.IntegerField(_("threads"), default=0)
    started_at = UTCDateTimeField(_("started"))
    seen_at = UTCDateTimeField(_("last heartbeat"))

    class Meta:
        db_table = "delayq_worker"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ()

    def __str__(self) -> str:
        return self.name
