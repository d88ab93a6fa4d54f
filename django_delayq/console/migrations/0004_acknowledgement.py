import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("delayq_console", "0003_topics"),
    ]

    operations = [
        migrations.CreateModel(
            name="Acknowledgement",
            fields=[
                ("error", models.CharField(max_length=200, primary_key=True, serialize=False, verbose_name="error")),
                ("at", models.DateTimeField(default=django.utils.timezone.now, verbose_name="at")),
                ("actor", models.CharField(max_length=200, verbose_name="actor")),
                ("note", models.TextField(blank=True, default="", verbose_name="note")),
                ("in_a_day", models.IntegerField(default=0, verbose_name="dead in the day before")),
            ],
            options={
                "verbose_name": "acknowledgement",
                "verbose_name_plural": "acknowledgements",
                "db_table": "delayq_acknowledgement",
                "default_permissions": (),
            },
        ),
    ]
