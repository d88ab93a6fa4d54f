"""The Django application of the tests."""

from __future__ import annotations

from django.apps import AppConfig


class TestAppConfig(AppConfig):
    name = "tests.app"
    label = "tests_app"
