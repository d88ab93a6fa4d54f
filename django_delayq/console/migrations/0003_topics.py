from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [
        ("delayq", "0001_initial"),
        ("delayq_console", "0002_run_time"),
    ]

    operations = [
        migrations.CreateModel(
            name="Topics",
            fields=[],
            options={
                "verbose_name": "topic",
                "verbose_name_plural": "topics",
                "proxy": True,
                "default_permissions": (),
                "indexes": [],
                "constraints": [],
            },
            bases=("delayq.message",),
        ),
    ]
