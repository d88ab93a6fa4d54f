"""The Django application of the tests."""

from __future__ import annotations

import json
import os
from functools import reduce
from importlib import import_module
from pkgutil import walk_packages

from django.apps import AppConfig

from django_delayq import broker, worker


class TestAppConfig(AppConfig):
    name = "tests.app"
    label = "tests_app"

    def ready(self) -> None:
        """Have the handlers of all modules, and set numbers of the worker and of the broker.

        DELAYQ_TEST_PACE names them, such as {"process.Parts.upkeep.leader_lease": 1.5}.
        """
        import_module("tests.app.children")
        for place, value in json.loads(os.environ.get("DELAYQ_TEST_PACE", "{}")).items():
            module, *owner, name = place.split(".")
            there = reduce(getattr, owner, import_module(_whole_name(module)))
            assert hasattr(there, name), place
            setattr(there, name, value)


def _whole_name(name: str) -> str:
    """Return the whole name of a module of the worker, or of the broker."""
    packages = (worker, broker)
    modules = (one.name for package in packages for one in walk_packages(package.__path__, f"{package.__name__}."))
    return next(module for module in modules if module.endswith(f".{name}"))
