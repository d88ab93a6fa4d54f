from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("delayq_http", "0001_initial"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="token",
            options={"verbose_name": "token", "verbose_name_plural": "tokens"},
        ),
        migrations.AddField(
            model_name="token",
            name="interval",
            field=models.IntegerField(null=True, verbose_name="interval in seconds"),
        ),
        migrations.AddField(
            model_name="token",
            name="reads",
            field=models.IntegerField(null=True, verbose_name="reads"),
        ),
        migrations.AddField(
            model_name="token",
            name="writes",
            field=models.IntegerField(null=True, verbose_name="writes"),
        ),
        migrations.AlterField(
            model_name="token",
            name="beginning",
            field=models.CharField(max_length=8, verbose_name="beginning"),
        ),
        migrations.AlterField(
            model_name="token",
            name="created_at",
            field=models.DateTimeField(auto_now_add=True, verbose_name="created at"),
        ),
        migrations.AlterField(
            model_name="token",
            name="description",
            field=models.CharField(blank=True, max_length=200, verbose_name="description"),
        ),
        migrations.AlterField(
            model_name="token",
            name="expires_at",
            field=models.DateTimeField(null=True, verbose_name="expires at"),
        ),
        migrations.AlterField(
            model_name="token",
            name="namespace",
            field=models.CharField(max_length=255, verbose_name="namespace"),
        ),
        migrations.AlterField(
            model_name="token",
            name="rights",
            field=models.CharField(max_length=40, verbose_name="rights"),
        ),
    ]
