"""The app whose handlers are tortured."""

from __future__ import annotations

from django.apps import AppConfig


class TortureConfig(AppConfig):
    name = "tests.torture.app"
    label = "torture"
