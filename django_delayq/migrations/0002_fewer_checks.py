"""Takes away two constraints that PostgreSQL reads anew for each statement: half the time of the statement of a success.

Workers and web processes of both versions go on meanwhile: a lock on the table is taken for a moment only, and what the
constraints said stays true of what both write. The way back checks all rows without a lock that stops anybody.
"""

from __future__ import annotations

from typing import Any

from django.db import migrations, transaction


class RemoveCheck(migrations.RemoveConstraint):
    """Removes a constraint on PostgreSQL. SQLite would make the whole table anew, and keeps it."""

    def _wait_for_a_moment_only(self, schema_editor: Any) -> None:
        """Give up when the table is in use for 2 s: whoever comes to the table later waits behind this migration."""
        schema_editor.execute("SET LOCAL lock_timeout = '2s'")

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            with transaction.atomic(using=schema_editor.connection.alias):
                self._wait_for_a_moment_only(schema_editor)
                super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor != "postgresql":
            return
        model = to_state.apps.get_model(app_label, self.model_name)
        constraint = to_state.models[app_label, self.model_name_lower].get_constraint_by_name(self.name)
        table = model._meta.db_table
        with transaction.atomic(using=schema_editor.connection.alias):
            self._wait_for_a_moment_only(schema_editor)
            schema_editor.execute(f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {self.name}")
            schema_editor.execute(f"{constraint.create_sql(model, schema_editor)} NOT VALID", params=None)
        # Reads all rows, beside everybody who writes some.
        schema_editor.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {self.name}")


class Migration(migrations.Migration):
    # A broken try is made again as a whole.
    atomic = False

    dependencies = [("delayq", "0001_initial")]

    operations = [RemoveCheck("message", "delayq_counts"), RemoveCheck("message", "delayq_state")]
