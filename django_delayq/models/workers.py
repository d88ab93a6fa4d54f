"""The worker processes, and what they have done."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from .. import validation


class Worker(models.Model):
    """A worker process, alive while ``seen_at`` moves on."""

    # One that was not seen for this long is taken for dead by statistics and checks. Seconds.
    ALIVE = 35.0

    name = models.CharField(_("name"), max_length=200, primary_key=True)
    host = models.CharField(_("host"), max_length=100)
    pid = models.IntegerField(_("process id"))
    queues = models.JSONField(_("queues"), default=list)
    threads = models.IntegerField(_("threads"), default=0)
    started_at = models.DateTimeField(_("started"))
    seen_at = models.DateTimeField(_("last seen"))

    class Meta:
        db_table = "delayq_worker"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ()

    def __str__(self) -> str:
        return self.name


class Rollup(models.Model):
    """What happened within a minute, or an hour, to the messages of one topic in one queue.

    Worker processes add to it a few seconds after the fact, so what a killed one had not written yet is missing:
    these are numbers to look at, the log is the truth. Lateness is that of first deliveries, from the due time to the
    claim, counted in classes: ``late_<ms>`` holds those up to that many ms that are in no smaller class.
    """

    # The upper bounds of the classes in ms; the last class has none.
    BOUNDS: ClassVar[tuple[int, ...]] = (
        *(1, 2, 5, 10, 20, 50, 100, 200, 500),
        *(1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 600_000),
    )

    # Of one length, in the order of time: that is how they are read, folded and deleted.
    pk = models.CompositePrimaryKey("seconds", "at", "queue", "topic")
    seconds = models.IntegerField(_("seconds"), default=60)
    at = models.DateTimeField(_("from"))
    queue = models.CharField(_("queue"), max_length=validation.QUEUE_LENGTH)
    topic = models.CharField(_("topic"), max_length=validation.TOPIC_LENGTH)
    consumed = models.IntegerField(_("consumed"), default=0)
    retried = models.IntegerField(_("retried"), default=0)
    dead = models.IntegerField(_("dead"), default=0)
    expired = models.IntegerField(_("expired"), default=0)
    late_1 = models.IntegerField(default=0)
    late_2 = models.IntegerField(default=0)
    late_5 = models.IntegerField(default=0)
    late_10 = models.IntegerField(default=0)
    late_20 = models.IntegerField(default=0)
    late_50 = models.IntegerField(default=0)
    late_100 = models.IntegerField(default=0)
    late_200 = models.IntegerField(default=0)
    late_500 = models.IntegerField(default=0)
    late_1000 = models.IntegerField(default=0)
    late_2000 = models.IntegerField(default=0)
    late_5000 = models.IntegerField(default=0)
    late_10000 = models.IntegerField(default=0)
    late_30000 = models.IntegerField(default=0)
    late_60000 = models.IntegerField(default=0)
    late_600000 = models.IntegerField(default=0)
    late_more = models.IntegerField(default=0)

    class Meta:
        db_table = "delayq_rollup"
        verbose_name = _("rollup")
        verbose_name_plural = _("rollups")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.topic} in {self.queue}, {self.seconds} s from {self.at:%Y-%m-%d %H:%M}"
