"""What people decide about queues and messages, and the trace of it."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from .. import validation


class Queue(models.Model):
    """A queue that was paused: its messages wait. A queue without a row is served."""

    # The pauses that last, by the database's clock.
    PAUSED = Q(resumes_at__isnull=True) | Q(resumes_at__gt=Now())

    name = models.CharField(_("name"), max_length=validation.QUEUE_LENGTH, primary_key=True)
    paused_at = models.DateTimeField(_("paused"), default=timezone.now)
    # Served again from then on, without anybody's doing; NULL: when somebody resumes it.
    resumes_at = models.DateTimeField(_("resumes"), null=True, blank=True)
    paused_by = models.CharField(_("paused by"), max_length=200, default="", blank=True)
    reason = models.TextField(_("reason"), default="", blank=True)

    class Meta:
        db_table = "delayq_queue"
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        default_permissions = ()
        permissions: ClassVar = [("pause_queue", "Can pause and resume queues")]

    def __str__(self) -> str:
        return self.name


class Operation(models.Model):
    """One verb on many messages: a worker does it in batches, so that nobody has to wait in front of a page."""

    class State(models.TextChoices):
        QUEUED = "queued", _("queued")
        RUNNING = "running", _("running")
        STOPPED = "stopped", _("stopped")
        DONE = "done", _("done")
        FAILED = "failed", _("failed")

    id = models.BigAutoField(primary_key=True)
    verb = models.CharField(_("verb"), max_length=20)
    # Which messages, and what with them; as the verb reads them.
    scope = models.JSONField(_("scope"), default=dict)
    arguments = models.JSONField(_("arguments"), default=dict)
    # The scope in words.
    described = models.TextField(_("messages"), default="", blank=True)
    reason = models.TextField(_("reason"), default="", blank=True)
    # "user:anna", "command:…", "worker:…"
    started_by = models.CharField(_("started by"), max_length=200, default="", blank=True)
    state = models.CharField(_("state"), max_length=7, choices=State.choices, default=State.QUEUED)
    created_at = models.DateTimeField(_("created"), default=timezone.now)
    started_at = models.DateTimeField(_("started"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished"), null=True, blank=True)
    # How many messages there were at the beginning; NULL: not counted, or too many to count.
    total = models.BigIntegerField(_("total"), null=True, blank=True)
    done = models.BigIntegerField(_("done"), default=0)
    # What came of them: a word → how many.
    outcomes = models.JSONField(_("outcomes"), default=dict)
    # Where to go on; as the verb reads it.
    position = models.TextField(_("position"), default="", blank=True)
    stop_requested = models.BooleanField(_("stop requested"), default=False)
    # Who works on it, and until when nobody else may.
    worker = models.CharField(_("worker"), max_length=200, default="", blank=True)
    leased_until = models.DateTimeField(_("leased until"), null=True, blank=True)
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
        return f"#{self.pk} {self.verb}"


class AuditEvent(models.Model):
    """Who did what, when, why, and to how many. Written once, never changed.

    The user is kept by name and key, not by reference: the row outlives the user.
    """

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(_("at"), default=timezone.now)
    # As in the log of messages: "user:anna", "command:…".
    actor = models.CharField(_("actor"), max_length=200)
    user_key = models.CharField(_("user's key"), max_length=100, default="", blank=True)
    verb = models.CharField(_("verb"), max_length=20)
    # What it was done to, in words; and the message, if it was one.
    target = models.TextField(_("target"), default="", blank=True)
    message_id = models.BigIntegerField(_("message"), null=True, blank=True)
    reason = models.TextField(_("reason"), default="", blank=True)
    # What came of it: a word → how many.
    outcomes = models.JSONField(_("outcomes"), default=dict)
    # What was answered with this was answered once.
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
        return f"{self.actor}: {self.verb} {self.target}"
