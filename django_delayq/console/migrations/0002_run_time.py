"""Adds the run times of handlers to the rollups.

Workers of both versions go on meanwhile: a lock on the table is taken for a moment only, no row is written anew, and what an
older worker inserts gets the default of the database.
"""

from __future__ import annotations

from typing import Any

from django.db import migrations, models

# The upper bounds of the classes in ms.
BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000, 600_000)


def column(name: str, kind: type[models.Field]) -> migrations.AddField:  # type: ignore[type-arg]
    return migrations.AddField("rollup", name, kind(null=True, db_default=models.Value(0)))


def wait_for_a_moment_only(apps: Any, schema_editor: Any) -> None:
    """Give up when the table is in use for 2 s: whoever comes to the table later waits behind this migration."""
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("SET LOCAL lock_timeout = '2s'")


class Migration(migrations.Migration):
    dependencies = [("delayq_console", "0001_initial")]

    operations = [
        migrations.RunPython(wait_for_a_moment_only, migrations.RunPython.noop),
        *(column(f"run_{bound}", models.IntegerField) for bound in (*BOUNDS, "more")),
        column("run_us", models.BigIntegerField),
        migrations.RunPython(migrations.RunPython.noop, wait_for_a_moment_only),
    ]
