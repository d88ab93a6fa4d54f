from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    dependencies = [("delayq_recurring", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="schedule",
            name="resumes_at",
            field=models.DateTimeField(blank=True, null=True, verbose_name="resumes"),
        ),
        migrations.AddIndex(
            model_name="schedule",
            index=models.Index(condition=Q(paused=True), fields=["resumes_at"], name="delayq_resumes"),
        ),
    ]
