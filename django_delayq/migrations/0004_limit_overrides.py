"""Makes the table of limits that are changed at run time. Workers of an earlier version know nothing of it."""

from __future__ import annotations

import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("delayq", "0003_from_sql"),
    ]

    operations = [
        migrations.CreateModel(
            name="LimitOverride",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("name", models.CharField(max_length=320, unique=True, verbose_name="name")),
                ("limit", models.PositiveIntegerField(blank=True, null=True, verbose_name="limit")),
                ("rate", models.CharField(blank=True, default="", max_length=40, verbose_name="rate")),
                ("burst", models.PositiveIntegerField(blank=True, null=True, verbose_name="burst")),
                ("since", models.DateTimeField(default=django.utils.timezone.now, verbose_name="since")),
                ("until", models.DateTimeField(blank=True, null=True, verbose_name="until")),
                ("set_by", models.CharField(blank=True, default="", max_length=200, verbose_name="set by")),
                ("reason", models.TextField(blank=True, default="", verbose_name="reason")),
            ],
            options={
                "verbose_name": "limit override",
                "verbose_name_plural": "limit overrides",
                "db_table": "delayq_limit_override",
                "permissions": [("override_limit", "Can override and reset limits")],
                "default_permissions": (),
            },
        ),
    ]
