"""The Django application of the tests."""

from __future__ import annotations

import os

from django.apps import AppConfig


class TestAppConfig(AppConfig):
    name = "tests.app"
    label = "tests_app"

    def ready(self) -> None:
        if "DELAYQ_TEST_HUNG" in os.environ:
            from django_delayq.worker import supervisor

            supervisor.HUNG = float(os.environ["DELAYQ_TEST_HUNG"])
