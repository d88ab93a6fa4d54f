"""Without Redis, and without the packages for it: the project starts, delivers, reports, and its tests run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .sources import SET_UP, report_of

NOT_INSTALLED = """
import sys


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"redis", "hiredis", "django_redis"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NotInstalled())
"""
DELIVER = """
from django.contrib.admin import site
from django.contrib.auth.models import User
from django.test import Client
from django.test.utils import setup_test_environment
from django.urls import reverse
from django_delayq.testing import DelayqMixin

setup_test_environment()
run("check")
handler("docs.ok")(lambda message: None)
schedule_message("docs.ok", delay=0)
schedule_message("docs.ok", delay=3600)
client = Client()
client.force_login(User.objects.create_superuser("anna"))
pages = [model for model in site._registry if model.__module__.startswith("django_delayq")]
paths = [reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist") for model in pages]
report = {
    "once": run("run_delayq", "--once"),
    "stats": run("delayq_stats"),
    "check": run("delayq_check", "handlers"),
    "states": sorted(Message.objects.values_list("state", flat=True)),
    "pages": {path: client.get(path).status_code for path in paths},
    "modules": sorted({name.partition(".")[0] for name in sys.modules} & {"redis", "hiredis", "django_redis"}),
}
sys.__stdout__.write(json.dumps(report))
"""


@pytest.mark.console
def test_a_project_without_redis_needs_none_of_its_packages(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in {"REDIS_URL", "DATABASE_URL"}}
    environment |= {
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "SQLITE_PATH": str(tmp_path / "alone.sqlite3"),
    }
    report = report_of(NOT_INSTALLED + SET_UP + DELIVER, environment)
    assert "1 delivered" in report["once"]
    assert report["states"] == ["consumed", "scheduled"]
    assert report["modules"] == []
    assert "docs.ok" in report["check"]
    assert report["stats"]
    assert len(report["pages"]) > 5
    assert set(report["pages"].values()) == {200}
