from __future__ import annotations

import uuid
from typing import Any

import django.db.models.deletion
import django.db.models.expressions
import django.utils.timezone
from django.core.management.base import CommandError
from django.db import migrations, models


def refuse_other_vendors(apps: Any, schema_editor: Any) -> None:
    """Refuse a database that cannot keep messages, before anything is made in it."""
    connection = schema_editor.connection
    if connection.vendor not in ("postgresql", "sqlite"):
        raise CommandError(
            f"django-delayq keeps messages in PostgreSQL or SQLite, and the database {connection.alias!r} is"
            f" {connection.display_name}: give the app delayq a database of its own with a database router."
        )


def leave_room_for_updates(apps: Any, schema_editor: Any) -> None:
    """Fill each page of the table of messages to 40 % only, so that new versions of its rows find room in it.

    A message is updated twice or more in its life. An update within one page writes only the changes to PostgreSQL's
    log: 2.0 kB instead of 2.4 kB for a message's whole life. The room of dead versions is used again, so the table
    grows no larger.
    """
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("ALTER TABLE delayq_message SET (fillfactor = 40)")


def vacuum_sooner(apps: Any, schema_editor: Any) -> None:
    """Have autovacuum clean the table of messages when 1 % of its rows are dead, and not 20 %.

    The indexes of waiting messages are read from their beginning, where the entries of messages that have left stay
    until then. A table with a long history would collect many of them.
    """
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(
            "ALTER TABLE delayq_message SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000)"
        )


# The columns of messages by which nobody searches.
UNSEARCHED = [
    "payload",
    "headers",
    "retry",
    "max_attempts",
    "timeout",
    "lease",
    "created_by",
    "reported",
    "excused",
    "conflicts",
    "moves",
    "claimed_at",
    "ready_at",
    "claimed_by",
    "consumed_by",
    "cancel_requested",
    "result",
]
# The columns by which pages, workers and commands search.
SEARCHED = [
    "id",
    "topic",
    "queue",
    "key",
    "key_for",
    "key_deliveries",
    "next_id",
    "priority",
    "due_at",
    "expires_at",
    "created_at",
    "limit_key",
    "state",
    "finished_at",
    "attempts",
    "deliveries",
    "leased_until",
    "worker",
    "error",
]


def analyze_less(apps: Any, schema_editor: Any) -> None:
    """Keep statistics of half the usual size, and none of columns by which nobody searches.

    Autovacuum analyzes a busy table once a minute, and handlers wait for the processor meanwhile. With 200,000 messages
    of 200 bytes that took 0.6 s, and takes 0.2 s like this.
    """
    if schema_editor.connection.vendor == "postgresql":
        sizes = {**dict.fromkeys(SEARCHED, 50), **dict.fromkeys(UNSEARCHED, 0)}
        changes = ", ".join(f"ALTER COLUMN {name} SET STATISTICS {size}" for name, size in sizes.items())
        schema_editor.execute(f"ALTER TABLE delayq_message {changes}")


# The whole log: its rows, and what the row of each message says of its own creation, claim and success.
TRANSITIONS = """
CREATE VIEW delayq_transition AS
SELECT message_id, number, at, from_state, to_state, delivery, due_at, ready_at, actor, reason, error, traceback,
       exception
  FROM delayq_log
UNION ALL
SELECT id, 1, created_at, NULL, 'scheduled', 0, due_at, NULL, created_by, '', '', '', ''
  FROM delayq_message WHERE created_by IS NOT NULL
UNION ALL
SELECT id, CASE WHEN state = 'running' THEN moves ELSE moves - 1 END, claimed_at, 'scheduled', 'running', deliveries,
       due_at, ready_at, 'worker:' || coalesce(claimed_by, worker),
       '', '', '', ''
  FROM delayq_message WHERE claimed_at IS NOT NULL
UNION ALL
SELECT id, moves, finished_at, 'running', 'consumed', deliveries, due_at, NULL, consumed_by, '', '', '', ''
  FROM delayq_message WHERE consumed_by IS NOT NULL
"""


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.RunPython(refuse_other_vendors, migrations.RunPython.noop),
        migrations.CreateModel(
            name="Queue",
            fields=[
                ("name", models.CharField(max_length=64, primary_key=True, serialize=False, verbose_name="name")),
                ("paused_at", models.DateTimeField(default=django.utils.timezone.now, verbose_name="paused")),
                ("resumes_at", models.DateTimeField(blank=True, null=True, verbose_name="resumes")),
                ("paused_by", models.CharField(blank=True, default="", max_length=200, verbose_name="paused by")),
                ("reason", models.TextField(blank=True, default="", verbose_name="reason")),
            ],
            options={
                "verbose_name": "queue",
                "verbose_name_plural": "queues",
                "db_table": "delayq_queue",
                "permissions": [("pause_queue", "Can pause and resume queues")],
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Worker",
            fields=[
                ("name", models.CharField(max_length=200, primary_key=True, serialize=False, verbose_name="name")),
                ("host", models.CharField(max_length=100, verbose_name="host")),
                ("pid", models.IntegerField(verbose_name="process id")),
                ("queues", models.JSONField(default=list, verbose_name="queues")),
                ("topics", models.JSONField(default=list, verbose_name="topics")),
                ("threads", models.IntegerField(default=0, verbose_name="threads")),
                ("started_at", models.DateTimeField(verbose_name="started")),
                ("seen_at", models.DateTimeField(verbose_name="last heartbeat")),
            ],
            options={
                "verbose_name": "worker",
                "verbose_name_plural": "workers",
                "db_table": "delayq_worker",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Identity",
            fields=[
                ("id", models.SmallIntegerField(default=1, primary_key=True, serialize=False)),
                ("value", models.UUIDField(default=uuid.uuid4)),
            ],
            options={
                "db_table": "delayq_identity",
                "default_permissions": (),
                "constraints": [models.CheckConstraint(condition=models.Q(("id", 1)), name="delayq_one_identity")],
            },
        ),
        migrations.CreateModel(
            name="Message",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("topic", models.CharField(max_length=100, verbose_name="topic")),
                ("queue", models.CharField(max_length=64, verbose_name="queue")),
                ("key", models.CharField(blank=True, max_length=200, null=True, verbose_name="key")),
                ("priority", models.SmallIntegerField(default=0, verbose_name="priority")),
                ("payload", models.JSONField(blank=True, null=True, verbose_name="payload")),
                ("headers", models.JSONField(blank=True, default=dict, verbose_name="headers")),
                ("due_at", models.DateTimeField(verbose_name="due")),
                ("expires_at", models.DateTimeField(blank=True, null=True, verbose_name="expires")),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now, verbose_name="created")),
                ("retry", models.JSONField(blank=True, null=True, verbose_name="retry policy")),
                ("max_attempts", models.SmallIntegerField(blank=True, null=True, verbose_name="attempts at most")),
                ("timeout", models.FloatField(blank=True, null=True, verbose_name="timeout")),
                ("lease", models.FloatField(blank=True, null=True, verbose_name="lease")),
                ("key_for", models.FloatField(blank=True, null=True, verbose_name="key held after the end")),
                (
                    "key_deliveries",
                    models.IntegerField(blank=True, null=True, verbose_name="deliveries with the key"),
                ),
                ("next_id", models.BigIntegerField(editable=False, null=True)),
                (
                    "limit_key",
                    models.CharField(blank=True, max_length=200, null=True, verbose_name="limit key"),
                ),
                ("created_by", models.CharField(editable=False, max_length=200, null=True)),
                (
                    "state",
                    models.TextField(
                        choices=[
                            ("scheduled", "scheduled"),
                            ("running", "running"),
                            ("consumed", "consumed"),
                            ("dead", "dead"),
                            ("cancelled", "cancelled"),
                            ("expired", "expired"),
                        ],
                        default="scheduled",
                        verbose_name="state",
                    ),
                ),
                ("finished_at", models.DateTimeField(blank=True, null=True, verbose_name="finished")),
                ("attempts", models.IntegerField(default=0, verbose_name="attempts")),
                ("deliveries", models.IntegerField(default=0, verbose_name="deliveries")),
                ("reported", models.IntegerField(default=0, verbose_name="reported deliveries")),
                ("excused", models.IntegerField(default=0, verbose_name="excused deliveries")),
                ("conflicts", models.SmallIntegerField(db_default=0, default=0, editable=False)),
                ("moves", models.IntegerField(default=1, verbose_name="moves")),
                ("leased_until", models.DateTimeField(blank=True, null=True, verbose_name="leased until")),
                ("claimed_at", models.DateTimeField(editable=False, null=True)),
                ("ready_at", models.DateTimeField(editable=False, null=True)),
                ("claimed_by", models.CharField(editable=False, max_length=200, null=True)),
                ("consumed_by", models.CharField(editable=False, max_length=200, null=True)),
                ("worker", models.CharField(blank=True, default="", max_length=200, verbose_name="worker")),
                ("cancel_requested", models.BooleanField(default=False, verbose_name="cancel requested")),
                (
                    "error",
                    models.CharField(blank=True, db_default="", default="", max_length=200, verbose_name="error"),
                ),
                ("result", models.JSONField(blank=True, null=True, verbose_name="result")),
            ],
            options={
                "verbose_name": "message",
                "verbose_name_plural": "messages",
                "db_table": "delayq_message",
                "permissions": [
                    ("cancel_message", "Can cancel messages"),
                    ("reschedule_message", "Can reschedule messages"),
                    ("run_message", "Can run messages now"),
                    ("requeue_message", "Can requeue dead, expired and cancelled messages"),
                    ("purge_message", "Can purge finished messages"),
                    ("bulk_message", "Can act on everything that a filter finds"),
                    ("export_message", "Can export messages"),
                    ("reveal_message", "Can see payloads unmasked"),
                    ("restore_message", "Can restore Redis from the record"),
                ],
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("state", "scheduled")),
                        fields=["queue", "due_at", "id", "priority"],
                        name="delayq_todo",
                    ),
                    models.Index(
                        condition=models.Q(("state", "running")), fields=["leased_until"], name="delayq_leased"
                    ),
                    models.Index(
                        condition=models.Q(("expires_at__isnull", False), ("state", "scheduled")),
                        fields=["expires_at"],
                        name="delayq_expiring",
                    ),
                    models.Index(
                        condition=models.Q(("key__isnull", False)),
                        fields=["key", "topic", "state"],
                        name="delayq_key",
                    ),
                    models.Index(
                        condition=models.Q(("state__in", ["cancelled", "dead", "expired"])),
                        fields=["state", "finished_at", "id", "queue"],
                        name="delayq_unconsumed",
                    ),
                    models.Index(
                        condition=models.Q(("error", ""), _negated=True),
                        fields=["error", "state", "finished_at", "id"],
                        name="delayq_error",
                    ),
                    models.Index(
                        condition=models.Q(("finished_at__isnull", False)),
                        fields=["finished_at", "id"],
                        name="delayq_finished",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(
                            ("key__isnull", False),
                            ("next_id__isnull", True),
                            models.Q(
                                ("key_for__isnull", False),
                                models.Q(
                                    models.Q(
                                        ("key_deliveries__isnull", True),
                                        ("deliveries__lte", models.F("key_deliveries")),
                                        _connector="OR",
                                    ),
                                    ("state__in", ["running", "scheduled"]),
                                ),
                                _connector="OR",
                            ),
                        ),
                        fields=("topic", "key"),
                        name="delayq_held_key",
                    ),
                    models.CheckConstraint(
                        condition=models.Case(
                            models.When(
                                leased_until__isnull=False,
                                then=models.ExpressionWrapper(
                                    models.Q(("finished_at__isnull", True), ("state", "running")),
                                    output_field=models.BooleanField(),
                                ),
                            ),
                            models.When(
                                finished_at__isnull=True,
                                then=models.ExpressionWrapper(
                                    models.Q(("state", "scheduled")),
                                    output_field=models.BooleanField(),
                                ),
                            ),
                            default=models.ExpressionWrapper(
                                models.Q(("state__in", ["cancelled", "consumed", "dead", "expired"])),
                                output_field=models.BooleanField(),
                            ),
                            output_field=models.BooleanField(),
                        ),
                        name="delayq_state",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("attempts__gte", 0),
                            ("attempts__lte", models.F("reported")),
                            ("excused__gte", 0),
                            ("moves__gte", 1),
                            (
                                "reported__lte",
                                django.db.models.expressions.CombinedExpression(
                                    models.F("deliveries"), "-", models.F("excused")
                                ),
                            ),
                        ),
                        name="delayq_counts",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("priority__gte", -100), ("priority__lte", 100)), name="delayq_priority"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("due_at__gte", "2000-01-01T00:00:00Z"), ("due_at__lte", "2200-01-01T00:00:00Z")
                        ),
                        name="delayq_due",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="LogRow",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "message_id", "number", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("number", models.IntegerField(verbose_name="number")),
                ("at", models.DateTimeField(verbose_name="at")),
                (
                    "from_state",
                    models.CharField(
                        choices=[
                            ("scheduled", "scheduled"),
                            ("running", "running"),
                            ("consumed", "consumed"),
                            ("dead", "dead"),
                            ("cancelled", "cancelled"),
                            ("expired", "expired"),
                        ],
                        max_length=9,
                        null=True,
                        verbose_name="from",
                    ),
                ),
                (
                    "to_state",
                    models.CharField(
                        choices=[
                            ("scheduled", "scheduled"),
                            ("running", "running"),
                            ("consumed", "consumed"),
                            ("dead", "dead"),
                            ("cancelled", "cancelled"),
                            ("expired", "expired"),
                        ],
                        max_length=9,
                        verbose_name="to",
                    ),
                ),
                ("delivery", models.IntegerField(default=0, verbose_name="delivery")),
                ("due_at", models.DateTimeField(verbose_name="due")),
                ("ready_at", models.DateTimeField(null=True, verbose_name="ready")),
                ("actor", models.CharField(default="", max_length=200, verbose_name="actor")),
                ("reason", models.TextField(default="", verbose_name="reason")),
                ("error", models.TextField(default="", verbose_name="error")),
                ("traceback", models.TextField(default="", verbose_name="traceback")),
                ("exception", models.CharField(db_default="", default="", max_length=200, verbose_name="exception")),
                (
                    "message",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="+",
                        to="delayq.message",
                    ),
                ),
            ],
            options={
                "db_table": "delayq_log",
                "ordering": ["message_id", "number"],
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Transition",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "message_id", "number", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("number", models.IntegerField(verbose_name="number")),
                ("at", models.DateTimeField(verbose_name="at")),
                (
                    "from_state",
                    models.CharField(
                        choices=[
                            ("scheduled", "scheduled"),
                            ("running", "running"),
                            ("consumed", "consumed"),
                            ("dead", "dead"),
                            ("cancelled", "cancelled"),
                            ("expired", "expired"),
                        ],
                        max_length=9,
                        null=True,
                        verbose_name="from",
                    ),
                ),
                (
                    "to_state",
                    models.CharField(
                        choices=[
                            ("scheduled", "scheduled"),
                            ("running", "running"),
                            ("consumed", "consumed"),
                            ("dead", "dead"),
                            ("cancelled", "cancelled"),
                            ("expired", "expired"),
                        ],
                        max_length=9,
                        verbose_name="to",
                    ),
                ),
                ("delivery", models.IntegerField(default=0, verbose_name="delivery")),
                ("due_at", models.DateTimeField(verbose_name="due")),
                ("ready_at", models.DateTimeField(null=True, verbose_name="ready")),
                ("actor", models.CharField(default="", max_length=200, verbose_name="actor")),
                ("reason", models.TextField(default="", verbose_name="reason")),
                ("error", models.TextField(default="", verbose_name="error")),
                ("traceback", models.TextField(default="", verbose_name="traceback")),
                ("exception", models.CharField(db_default="", default="", max_length=200, verbose_name="exception")),
                (
                    "message",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="transitions",
                        to="delayq.message",
                    ),
                ),
            ],
            options={
                "verbose_name": "transition",
                "verbose_name_plural": "transitions",
                "db_table": "delayq_transition",
                "managed": False,
                "ordering": ["message_id", "number"],
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Lease",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "message_id", "delivery", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("message_id", models.BigIntegerField()),
                ("delivery", models.IntegerField()),
                ("until", models.DateTimeField()),
            ],
            options={
                "db_table": "delayq_lease",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Place",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "name", "message_id", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("name", models.CharField(max_length=320)),
                ("message_id", models.BigIntegerField()),
                ("delivery", models.IntegerField()),
            ],
            options={
                "db_table": "delayq_place",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Rate",
            fields=[
                ("name", models.CharField(max_length=320, primary_key=True, serialize=False)),
                ("full_at", models.DateTimeField()),
            ],
            options={
                "db_table": "delayq_rate",
                "default_permissions": (),
                "indexes": [models.Index(fields=["full_at"], name="delayq_rate_full")],
            },
        ),
        migrations.RunPython(leave_room_for_updates, migrations.RunPython.noop),
        migrations.RunPython(analyze_less, migrations.RunPython.noop),
        migrations.RunPython(vacuum_sooner, migrations.RunPython.noop),
        # The last one: SQLite makes a table anew to change it, which it refuses while a view reads the table.
        migrations.RunSQL(TRANSITIONS, "DROP VIEW delayq_transition"),
    ]
