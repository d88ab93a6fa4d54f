"""The console's tables: operations, audit events and rollups; and proxies as menu entries of pages without a table."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..core import actors, bounds
from ..models import Message
from ..models.fields import UTCDateTimeField


class OperationState(models.TextChoices):
    """The states of an operation. It is open while it is queued or running."""

    QUEUED = "queued", _("queued")
    RUNNING = "running", _("running")
    STOPPED = "stopped", _("stopped")
    DONE = "done", _("done")
    FAILED = "failed", _("failed")


class Operation(models.Model):
    """The record of a bulk action, restore or check. A worker does it in steps, so that nobody waits for a page."""

    id = models.BigAutoField(primary_key=True)
    action = models.CharField(_("action"), max_length=20)
    # The messages, and what to do with them, as the work of the action reads it.
    scope = models.JSONField(_("scope"), default=dict)
    arguments = models.JSONField(_("arguments"), default=dict)
    # The scope in words.
    described = models.TextField(_("messages"), default="", blank=True)
    reason = models.TextField(_("reason"), default="", blank=True)
    # "user:anna", "command:…", "worker:…"
    started_by = models.CharField(_("started by"), max_length=200, default="", blank=True)
    state = models.CharField(_("state"), max_length=7, choices=OperationState.choices, default=OperationState.QUEUED)
    created_at = UTCDateTimeField(_("created"), default=timezone.now)
    # The start, moved later by the time for which the operation has stood still.
    started_at = UTCDateTimeField(_("started"), null=True, blank=True)
    finished_at = UTCDateTimeField(_("finished"), null=True, blank=True)
    # The number of messages at the beginning; NULL: not counted, or too many to count.
    total = models.BigIntegerField(_("total"), null=True, blank=True)
    done = models.BigIntegerField(_("done"), default=0)
    # The outcomes: a word → the number of messages.
    outcomes = models.JSONField(_("outcomes"), default=dict)
    # The position to go on from, as the work of the action reads it.
    position = models.TextField(_("position"), default="", blank=True)
    stop_requested = models.BooleanField(_("stop requested"), default=False)
    # The worker that does it, and until when no other worker may.
    worker = models.CharField(_("worker"), max_length=200, default="", blank=True)
    leased_until = UTCDateTimeField(_("leased until"), null=True, blank=True)
    error = models.TextField(_("error"), default="", blank=True)

    class Meta:
        db_table = "delayq_operation"
        verbose_name = _("operation")
        verbose_name_plural = _("operations")
        default_permissions = ("view",)
        indexes: ClassVar = [
            models.Index(fields=["id"], name="delayq_open_operation", condition=Q(state__in=["queued", "running"])),
        ]

    def __str__(self) -> str:
        return f"#{self.pk} {self.action}"

    @property
    def starter(self) -> str:
        """Who started it, as pages name that one."""
        return actors.display_name(self.started_by)


class AuditEvent(models.Model):
    """One action of a person or a command: who did what, when, why, and to how many. Written once, never changed.

    The user is kept by name and key, not by reference: the row outlives the user.
    """

    id = models.BigAutoField(primary_key=True)
    at = UTCDateTimeField(_("at"), default=timezone.now)
    # As in the log of messages: "user:anna", "command:…".
    actor = models.CharField(_("actor"), max_length=200)
    user_key = models.CharField(_("user's key"), max_length=100, default="", blank=True)
    action = models.CharField(_("action"), max_length=20)
    # The target in words; and the message, when the target was one message.
    target = models.TextField(_("target"), default="", blank=True)
    message_id = models.BigIntegerField(_("message"), null=True, blank=True)
    reason = models.TextField(_("reason"), default="", blank=True)
    # The outcomes: a word → the number of messages.
    outcomes = models.JSONField(_("outcomes"), default=dict)
    # A form that carried this nonce was carried out once.
    nonce = models.CharField(max_length=32, null=True, unique=True, editable=False)  # noqa: DJ001
    operation = models.ForeignKey(
        Operation, verbose_name=_("operation"), null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )

    class Meta:
        db_table = "delayq_audit_event"
        verbose_name = _("audit event")
        verbose_name_plural = _("audit events")
        default_permissions = ("view",)
        ordering: ClassVar = ["-id"]
        indexes: ClassVar = [
            models.Index(fields=["message_id", "id"], name="delayq_audited", condition=Q(message_id__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.actor}: {self.action} {self.target}"

    @property
    def who(self) -> str:
        """The actor as pages name it."""
        return actors.display_name(self.actor)


class Acknowledgement(models.Model):
    """An error that somebody knows of. It counts as unknown again when more messages die of it in a day than before."""

    # The kind of error, as messages have it.
    error = models.CharField(_("error"), max_length=bounds.LENGTHS.kind, primary_key=True)
    at = UTCDateTimeField(_("at"), default=timezone.now)
    # As in the log of messages: "user:anna".
    actor = models.CharField(_("actor"), max_length=bounds.LENGTHS.actor)
    note = models.TextField(_("note"), default="", blank=True)
    # The number of messages that had died of it in the day before.
    in_a_day = models.IntegerField(_("dead in the day before"), default=0)

    class Meta:
        db_table = "delayq_acknowledgement"
        verbose_name = _("acknowledgement")
        verbose_name_plural = _("acknowledgements")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.actor}: {self.error}"

    @property
    def who(self) -> str:
        """The actor as pages name it."""
        return actors.display_name(self.actor)


class Rollup(models.Model):
    """Counts of what happened within a minute, or an hour, to the messages of one topic in one queue.

    Worker processes add to it a few seconds later, so the last counts of a killed process are missing: the numbers are
    for charts, and the log has the exact ones. Lateness is that of first deliveries, from the due time to the claim,
    counted in classes: ``late_<ms>`` counts those up to that many ms that are in no smaller class. So are the run times
    of handlers, whatever their outcome; a worker of 0.9.0 counts none, so that a rollup may have deliveries without.
    """

    # The upper bounds of the classes of lateness and run time in ms; the last class has none.
    BOUNDS: ClassVar[tuple[int, ...]] = (
        *(1, 2, 5, 10, 20, 50, 100, 200, 500),
        *(1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 600_000),
    )
    # The columns that count, in the order in which they are read and written.
    OUTCOMES: ClassVar[tuple[str, ...]] = ("consumed", "retried", "dead", "expired")
    LATENESS: ClassVar[tuple[str, ...]] = (*(f"late_{bound}" for bound in BOUNDS), "late_more")
    RUNTIME: ClassVar[tuple[str, ...]] = (*(f"run_{bound}" for bound in BOUNDS), "run_more")
    # ``run_us`` is the sum of the run times in µs.
    COUNTS: ClassVar[tuple[str, ...]] = (*OUTCOMES, *LATENESS, *RUNTIME, "run_us")

    # Rollups of one length in the order of time: they are read, compacted and deleted like that.
    pk = models.CompositePrimaryKey("seconds", "at", "queue", "topic")
    seconds = models.IntegerField(_("seconds"), default=60)
    at = UTCDateTimeField(_("from"))
    queue = models.CharField(_("queue"), max_length=bounds.LENGTHS.queue)
    topic = models.CharField(_("topic"), max_length=bounds.LENGTHS.topic)
    consumed = models.IntegerField(_("consumed"), default=0)
    retried = models.IntegerField(_("retried"), default=0)
    dead = models.IntegerField(_("dead"), default=0)
    expired = models.IntegerField(_("expired"), default=0)
    # The classes are many, so the class body makes their columns in a loop.
    vars().update((name, models.IntegerField(default=0)) for name in LATENESS)
    # NULL is allowed for SQLite, which would make the whole table anew to add a column without.
    vars().update((name, models.IntegerField(null=True, db_default=models.Value(0))) for name in RUNTIME)
    run_us = models.BigIntegerField(null=True, db_default=models.Value(0))

    class Meta:
        db_table = "delayq_rollup"
        verbose_name = _("rollup")
        verbose_name_plural = _("rollups")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.topic} in {self.queue}, {self.seconds} s from {self.at:%Y-%m-%d %H:%M}"


class _MenuEntry:
    """Common to the proxies for pages without a table."""

    proxy = True
    default_permissions = ()


class Dashboard(Message):
    """The menu entry of the dashboard."""

    class Meta(_MenuEntry):
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")


class Topics(Message):
    """The menu entry of the topics."""

    class Meta(_MenuEntry):
        verbose_name = _("topic")
        verbose_name_plural = _("topics")


class Limits(Message):
    """The menu entry of the limits."""

    class Meta(_MenuEntry):
        verbose_name = _("limit")
        verbose_name_plural = _("limits")


class DeadLetters(Message):
    """The menu entry of the dead letters."""

    class Meta(_MenuEntry):
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")


class Health(Message):
    """The menu entry of the health page."""

    class Meta(_MenuEntry):
        verbose_name = _("health")
        verbose_name_plural = _("health")
