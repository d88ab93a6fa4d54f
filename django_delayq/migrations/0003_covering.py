from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_delayq", "0002_room")]

    operations = [
        migrations.RemoveIndex(model_name="message", name="delayq_todo"),
        migrations.AddIndex(
            model_name="message",
            index=models.Index(
                condition=models.Q(("state", "scheduled")),
                fields=["queue", "due_at", "id", "priority"],
                name="delayq_todo",
            ),
        ),
    ]
