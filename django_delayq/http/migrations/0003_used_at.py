from typing import Any

from django.db import migrations, models
from django.utils import timezone


def count_as_used(apps: Any, schema_editor: Any) -> None:
    """Count the tokens that there are as used now: nobody knows when they were, and none shall look as if it never was."""
    tokens = apps.get_model("delayq_http", "Token").objects.using(schema_editor.connection.alias)
    tokens.update(used_at=timezone.now())


class Migration(migrations.Migration):
    dependencies = [
        ("delayq_http", "0002_limits"),
    ]

    operations = [
        migrations.AddField(
            model_name="token",
            name="used_at",
            field=models.DateTimeField(null=True, verbose_name="last used"),
        ),
        migrations.RunPython(count_as_used, migrations.RunPython.noop),
    ]
