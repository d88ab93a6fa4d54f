import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [("delayq", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="Declarations",
            fields=[
                ("fingerprint", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("names", models.JSONField(default=list)),
                ("since", models.DateTimeField()),
                ("seen_at", models.DateTimeField()),
            ],
            options={
                "db_table": "delayq_declarations",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Occurrence",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "schedule", "at", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("schedule", models.CharField(max_length=100, verbose_name="schedule")),
                ("at", models.DateTimeField(verbose_name="at")),
                ("message_id", models.BigIntegerField(verbose_name="message")),
            ],
            options={
                "verbose_name": "occurrence",
                "verbose_name_plural": "occurrences",
                "db_table": "delayq_occurrence",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Schedule",
            fields=[
                ("name", models.CharField(max_length=100, primary_key=True, serialize=False, verbose_name="name")),
                ("topic", models.CharField(max_length=100, verbose_name="topic")),
                ("payload", models.JSONField(blank=True, null=True, verbose_name="payload")),
                ("queue", models.CharField(blank=True, default="", max_length=64, verbose_name="queue")),
                ("priority", models.SmallIntegerField(blank=True, null=True, verbose_name="priority")),
                ("cron", models.CharField(blank=True, default="", max_length=200, verbose_name="cron expression")),
                ("every", models.CharField(blank=True, default="", max_length=40, verbose_name="every")),
                ("time_zone", models.CharField(default="UTC", max_length=64, verbose_name="time zone")),
                ("starts_at", models.DateTimeField(blank=True, null=True, verbose_name="from")),
                ("ends_at", models.DateTimeField(blank=True, null=True, verbose_name="until")),
                (
                    "missed",
                    models.CharField(
                        choices=[("once", "run once"), ("all", "run all"), ("skip", "skip")],
                        default="once",
                        max_length=4,
                        verbose_name="missed",
                    ),
                ),
                ("expires", models.CharField(blank=True, default="", max_length=40, verbose_name="expires after")),
                ("topic_queue", models.CharField(default="", editable=False, max_length=64)),
                ("topic_priority", models.SmallIntegerField(editable=False, null=True)),
                ("limit_key", models.CharField(editable=False, max_length=200, null=True)),
                ("declared", models.BooleanField(default=False, verbose_name="declared in code")),
                ("created_at", models.DateTimeField(default=django.utils.timezone.now, verbose_name="created")),
                ("paused", models.BooleanField(default=False, verbose_name="paused")),
                ("ended", models.BooleanField(default=False, verbose_name="ended")),
                ("last_at", models.DateTimeField(default=django.utils.timezone.now, verbose_name="decided until")),
                ("message_id", models.BigIntegerField(blank=True, null=True, verbose_name="message")),
            ],
            options={
                "verbose_name": "schedule",
                "verbose_name_plural": "schedules",
                "db_table": "delayq_schedule",
                "ordering": ["name"],
                "permissions": [
                    ("pause_schedule", "Can pause and resume schedules"),
                    ("run_schedule", "Can run schedules now"),
                ],
                "indexes": [
                    models.Index(
                        condition=models.Q(("ended", False), ("paused", False)), fields=["last_at"], name="delayq_next"
                    )
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("cron", ""), ("every", ""), _connector="OR"),
                            models.Q(("cron", ""), ("every", ""), _negated=True),
                        ),
                        name="delayq_cron_or_every",
                    )
                ],
            },
        ),
    ]
