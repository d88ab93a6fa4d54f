"""The configuration of the app whose handlers the torture runs."""

from __future__ import annotations

from django.apps import AppConfig


class TortureConfig(AppConfig):
    name = "tests.torture.app"
    label = "torture"
