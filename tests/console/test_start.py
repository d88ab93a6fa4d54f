"""What the console costs a process that shows none of its pages: commands, workers, ``manage.py check``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from django.contrib import admin
from django.db.models import Model

from django_delayq.console.admin import MessageAdmin, register
from django_delayq.console.admin.site import PAGES, OnDemand
from django_delayq.models import Message

# Prints the modules of the console that a start of the project has imported, its addresses included.
STARTED = """
import sys, django
django.setup()
from django.core.management import call_command
from django.urls import reverse
call_command("check", verbosity=0)
reverse("admin:delayq_message_changelist")
print(*(name for name in sys.modules if name.startswith("django_delayq.console.")))
"""


def test_a_process_that_shows_no_page_imports_none() -> None:
    started = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=True)
    loaded = started.stdout.split()
    assert "django_delayq.console.admin.site" in loaded
    for name in ("admin.page", "admin.message_list", "admin.dashboard_page", "operations", "search", "statistics"):
        assert f"django_delayq.console.{name}" not in loaded


@pytest.mark.parametrize("model", PAGES, ids=lambda model: model.__name__)
def test_each_page_passes_the_checks_of_django(model: type[Model]) -> None:
    stands: Any = admin.site.get_model_admin(model)
    assert isinstance(stands, OnDemand)
    assert stands.page.check() == []


def test_a_page_that_a_project_derives_has_all_addresses() -> None:
    class Derived(MessageAdmin):
        pass

    site = admin.AdminSite("derived")
    register(site)
    of_stand_in = {pattern.name for pattern in site.get_model_admin(Message).get_urls()}
    site.unregister(Message)
    site.register(Message, Derived)
    assert {pattern.name for pattern in site.get_model_admin(Message).get_urls()} == of_stand_in
    assert {"delayq_message_action", "delayq_message_export", "delayq_message_reveal"} <= of_stand_in
