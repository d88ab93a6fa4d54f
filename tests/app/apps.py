"""The Django application of the tests."""

from __future__ import annotations

import json
import os
from functools import reduce
from importlib import import_module

from django.apps import AppConfig


class TestAppConfig(AppConfig):
    name = "tests.app"
    label = "tests_app"

    def ready(self) -> None:
        """Have the handlers of all modules, and set constants in the worker's modules.

        DELAYQ_TEST_PACE names them, such as {"duty.DUTY_LEASE": 1.5}.
        """
        import_module("tests.app.children")
        for place, value in json.loads(os.environ.get("DELAYQ_TEST_PACE", "{}")).items():
            module, *owner, name = place.split(".")
            there = reduce(getattr, owner, import_module(f"django_delayq.worker.{module}"))
            assert hasattr(there, name), place
            setattr(there, name, value)
