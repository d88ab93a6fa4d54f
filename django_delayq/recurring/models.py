"""The tables of recurring messages: schedules, their occurrences, and the sets of declarations that workers know."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import Any, ClassVar, NoReturn

from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..core import bounds, values
from ..models.fields import UTCDateTimeField
from ..project import validation
from .definition import CRON_LENGTH, SPAN_LENGTH, ZONE_LENGTH, Definition, Missed


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
        "schedules are not written directly, for their waiting messages would stay as they are: use create_schedule(), "
        "pause_schedule(), resume_schedule() and delete_schedule()"
    )


class ScheduleQuerySet(models.QuerySet["Schedule"]):
    """Reads schedules, and refuses to write them."""

    bulk_create = bulk_update = update = delete = _refuse


class Schedule(models.Model):
    """A schedule: the times at which a message is made, and its content. Rows are only read here."""

    name = models.CharField(_("name"), max_length=bounds.LENGTHS.topic, primary_key=True)
    topic = models.CharField(_("topic"), max_length=bounds.LENGTHS.topic)
    payload = models.JSONField(_("payload"), null=True, blank=True)
    # "" and None: the queue and the priority of the topic.
    queue = models.CharField(_("queue"), max_length=bounds.LENGTHS.queue, default="", blank=True)
    priority = models.SmallIntegerField(_("priority"), null=True, blank=True)
    cron = models.CharField(_("cron expression"), max_length=CRON_LENGTH, default="", blank=True)
    every = models.CharField(_("every"), max_length=SPAN_LENGTH, default="", blank=True)
    time_zone = models.CharField(_("time zone"), max_length=ZONE_LENGTH, default="UTC")
    starts_at = UTCDateTimeField(_("from"), null=True, blank=True)
    ends_at = UTCDateTimeField(_("until"), null=True, blank=True)
    missed = models.CharField(_("missed"), max_length=4, choices=Missed.choices, default=Missed.ONCE)
    expires = models.CharField(_("expires after"), max_length=SPAN_LENGTH, default="", blank=True)
    # For processes that do not know the handler of the topic: the queue and the priority that it gave where the
    # definition was written ("" and None where it was unknown), and the limit key of the last message that was made
    # where it was known.
    topic_queue = models.CharField(max_length=bounds.LENGTHS.queue, default="", editable=False)
    topic_priority = models.SmallIntegerField(null=True, editable=False)
    limit_key = models.CharField(max_length=bounds.LENGTHS.key, null=True, editable=False)  # noqa: DJ001
    # True: @recurring in the code declares it, and its definition follows the code.
    declared = models.BooleanField(_("declared in code"), default=False)
    created_at = UTCDateTimeField(_("created"), default=timezone.now)
    paused = models.BooleanField(_("paused"), default=False)
    # None: the pause lasts until somebody resumes the schedule.
    resumes_at = UTCDateTimeField(_("resumes"), null=True, blank=True)
    # True: the schedule has no further time.
    ended = models.BooleanField(_("ended"), default=False)
    # All times up to this one are decided: they have their message, were missed, or came before the schedule was made.
    last_at = UTCDateTimeField(_("decided until"), default=timezone.now)
    # The message of the last occurrence. No reference: it may be purged.
    message_id = models.BigIntegerField(_("message"), null=True, blank=True)

    objects = ScheduleQuerySet.as_manager()

    save = delete = _refuse

    class Meta:
        db_table = "delayq_schedule"
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        ordering: ClassVar = ["name"]
        permissions: ClassVar = [
            ("pause_schedule", "Can pause and resume schedules"),
            ("run_schedule", "Can run schedules now"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["last_at"], name="delayq_next", condition=Q(paused=False, ended=False)),
            models.Index(fields=["resumes_at"], name="delayq_resumes", condition=Q(paused=True)),
        ]
        constraints: ClassVar = [
            models.CheckConstraint(
                name="delayq_cron_or_every", condition=(Q(cron="") | Q(every="")) & ~Q(cron="", every="")
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def definition(self) -> Definition:
        return Definition(*(getattr(self, field) for field in Definition.__dataclass_fields__))

    def is_paused(self, now: datetime) -> bool:
        """Tell whether the pause goes on: ``paused`` stays true until a scheduler has seen that the pause is over."""
        return self.paused and (self.resumes_at is None or self.resumes_at > now)

    @property
    def rule(self) -> str:
        """The cron expression with its time zone, or the interval."""
        return f"{self.cron} ({self.time_zone})" if self.cron else f"every {self.every}"

    def next_times(self, count: int = 10, *, after: datetime | None = None) -> list[datetime]:
        """Return the next ``count`` times of the schedule, in UTC, whether it is paused or not."""
        after = validation.checked("after", values.moment, after or timezone.now())
        return list(islice(self.definition.times.following(after), count))


class Occurrence(models.Model):
    """A time of a schedule that has its message. The row is unique: so no time has two messages.

    The name stands for the schedule, since the row outlives it: a schedule that is made again must not repeat a time.
    """

    pk = models.CompositePrimaryKey("schedule", "at")
    schedule = models.CharField(_("schedule"), max_length=bounds.LENGTHS.topic)
    at = UTCDateTimeField(_("at"))
    message_id = models.BigIntegerField(_("message"))

    class Meta:
        db_table = "delayq_occurrence"
        verbose_name = _("occurrence")
        verbose_name_plural = _("occurrences")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.schedule} {self.at:%Y-%m-%d %H:%M:%S}"


class Declarations(models.Model):
    """A set of declarations that live workers know: those of one version of the project's code."""

    fingerprint = models.CharField(max_length=64, primary_key=True)
    names = models.JSONField(default=list)
    # When the first worker with this set appeared: of two sets that have a name, the later one defines it.
    since = UTCDateTimeField()
    seen_at = UTCDateTimeField()

    class Meta:
        db_table = "delayq_declarations"
        default_permissions = ()

    def __str__(self) -> str:
        return self.fingerprint[:8]
