import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

# The upper bounds of the lateness classes in ms.
LATENESS_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000, 600_000)


def menu_entry(name: str, one: str, many: str) -> migrations.CreateModel:
    """Create a proxy of the messages, which is the menu entry of a page without a table."""
    options = {"verbose_name": one, "verbose_name_plural": many, "proxy": True, "default_permissions": ()}
    return migrations.CreateModel(
        name=name, fields=[], options={**options, "indexes": [], "constraints": []}, bases=("delayq.message",)
    )


class Migration(migrations.Migration):
    initial = True

    dependencies = [
        ("delayq", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="Rollup",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "seconds", "at", "queue", "topic", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("seconds", models.IntegerField(default=60, verbose_name="seconds")),
                ("at", models.DateTimeField(verbose_name="from")),
                ("queue", models.CharField(max_length=64, verbose_name="queue")),
                ("topic", models.CharField(max_length=100, verbose_name="topic")),
                ("consumed", models.IntegerField(default=0, verbose_name="consumed")),
                ("retried", models.IntegerField(default=0, verbose_name="retried")),
                ("dead", models.IntegerField(default=0, verbose_name="dead")),
                ("expired", models.IntegerField(default=0, verbose_name="expired")),
                *((f"late_{bound}", models.IntegerField(default=0)) for bound in LATENESS_BOUNDS),
                ("late_more", models.IntegerField(default=0)),
            ],
            options={
                "verbose_name": "rollup",
                "verbose_name_plural": "rollups",
                "db_table": "delayq_rollup",
                "default_permissions": (),
            },
        ),
        menu_entry("Dashboard", "dashboard", "dashboard"),
        menu_entry("Limits", "limit", "limits"),
        menu_entry("DeadLetters", "dead letter", "dead letters"),
        menu_entry("Health", "health", "health"),
        migrations.CreateModel(
            name="Operation",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("action", models.CharField(max_length=20, verbose_name="action")),
                ("scope", models.JSONField(default=dict, verbose_name="scope")),
                ("arguments", models.JSONField(default=dict, verbose_name="arguments")),
                ("described", models.TextField(blank=True, default="", verbose_name="messages")),
                ("reason", models.TextField(blank=True, default="", verbose_name="reason")),
                ("started_by", models.CharField(blank=True, default="", max_length=200, verbose_name="started by")),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("queued", "queued"),
                            ("running", "running"),
                            ("stopped", "stopped"),
                            ("done", "done"),
                            ("failed", "failed"),
                        ],
                        default="queued",
                        max_length=7,
                        verbose_name="state",
                    ),
                ),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now, verbose_name="created")),
                ("started_at", models.DateTimeField(blank=True, null=True, verbose_name="started")),
                ("finished_at", models.DateTimeField(blank=True, null=True, verbose_name="finished")),
                ("total", models.BigIntegerField(blank=True, null=True, verbose_name="total")),
                ("done", models.BigIntegerField(default=0, verbose_name="done")),
                ("outcomes", models.JSONField(default=dict, verbose_name="outcomes")),
                ("position", models.TextField(blank=True, default="", verbose_name="position")),
                ("stop_requested", models.BooleanField(default=False, verbose_name="stop requested")),
                ("worker", models.CharField(blank=True, default="", max_length=200, verbose_name="worker")),
                ("leased_until", models.DateTimeField(blank=True, null=True, verbose_name="leased until")),
                ("error", models.TextField(blank=True, default="", verbose_name="error")),
            ],
            options={
                "verbose_name": "operation",
                "verbose_name_plural": "operations",
                "db_table": "delayq_operation",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("state__in", ["queued", "running"])),
                        fields=["id"],
                        name="delayq_open_operation",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="AuditEvent",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("at", models.DateTimeField(default=django.utils.timezone.now, verbose_name="at")),
                ("actor", models.CharField(max_length=200, verbose_name="actor")),
                ("user_key", models.CharField(blank=True, default="", max_length=100, verbose_name="user's key")),
                ("action", models.CharField(max_length=20, verbose_name="action")),
                ("target", models.TextField(blank=True, default="", verbose_name="target")),
                ("message_id", models.BigIntegerField(blank=True, null=True, verbose_name="message")),
                ("reason", models.TextField(blank=True, default="", verbose_name="reason")),
                ("outcomes", models.JSONField(default=dict, verbose_name="outcomes")),
                ("nonce", models.CharField(editable=False, max_length=32, null=True, unique=True)),
                (
                    "operation",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="delayq_console.operation",
                        verbose_name="operation",
                    ),
                ),
            ],
            options={
                "verbose_name": "audit event",
                "verbose_name_plural": "audit events",
                "db_table": "delayq_audit_event",
                "ordering": ["-id"],
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("message_id__isnull", False)),
                        fields=["message_id", "id"],
                        name="delayq_audited",
                    )
                ],
            },
        ),
    ]
