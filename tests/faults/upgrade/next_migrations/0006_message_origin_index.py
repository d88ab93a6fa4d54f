"""An index on a large table, as a release adds one: built while everybody writes, and built anew after a broken try."""

from __future__ import annotations

from typing import Any

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class AddIndexOnline(AddIndexConcurrently):
    """Builds an index without a lock on PostgreSQL, and in the usual way elsewhere."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor != "postgresql":
            migrations.AddIndex.database_forwards(self, app_label, schema_editor, from_state, to_state)
            return
        # A build that was interrupted leaves an index behind that is not used, and whose name is taken.
        schema_editor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {self.index.name}")
        super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor != "postgresql":
            migrations.AddIndex.database_backwards(self, app_label, schema_editor, from_state, to_state)
            return
        super().database_backwards(app_label, schema_editor, from_state, to_state)


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("delayq", "0005_message_origin")]

    operations = [AddIndexOnline("message", models.Index(fields=["origin", "id"], name="delayq_origin"))]
