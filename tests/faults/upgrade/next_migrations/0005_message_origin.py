"""A new column, as a release adds one. It may be empty, and the database fills it, so old processes can insert."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models


def wait_for_a_moment_only(apps: Any, schema_editor: Any) -> None:
    """Give up when the table is in use for 2 s: whoever comes to the table later waits behind this migration."""
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("SET LOCAL lock_timeout = '2s'")


class Migration(migrations.Migration):
    dependencies = [("delayq", "0004_limit_overrides")]

    # With a Value, SQLite adds the column in place. Else Django makes the table anew, which the view on it forbids.
    # The way back runs the operations from the last to the first.
    operations = [
        migrations.RunPython(wait_for_a_moment_only, migrations.RunPython.noop),
        migrations.AddField(
            "message", "origin", models.CharField(max_length=100, null=True, db_default=models.Value("unknown"))
        ),
        migrations.RunPython(migrations.RunPython.noop, wait_for_a_moment_only),
    ]
