from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = [("delayq", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="Token",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("namespace", models.CharField(max_length=255)),
                ("digest", models.CharField(max_length=64, unique=True)),
                ("beginning", models.CharField(max_length=8)),
                ("rights", models.CharField(max_length=40)),
                ("description", models.CharField(blank=True, max_length=200)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField(null=True)),
            ],
            options={
                "db_table": "delayq_token",
                "default_permissions": (),
            },
        ),
    ]
