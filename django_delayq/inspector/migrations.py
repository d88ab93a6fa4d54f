"""Finds the tables of the queue and of its installed apps, and the migrations of them that are not applied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pkgutil import iter_modules

from django.apps import AppConfig, apps
from django.db import connections
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

_PACKAGE = __package__.partition(".")[0]


def pending_migrations(using: str) -> list[str]:
    """Return the migrations of the package's installed apps that are not applied, each as ``app_label.name``.

    It reads their names only: a graph of all migrations of the project would keep a worker from its work for longer.
    """
    applied = MigrationRecorder(connections[using]).applied_migrations()
    written = {config.label: sorted(_names(config.label)) for config in _own_apps() if any(config.get_models())}
    without = [f"{label} has none" for label, names in sorted(written.items()) if not names]
    pending = [f"{label}.{name}" for label, names in written.items() for name in names if (label, name) not in applied]
    return without + pending


def own_tables() -> list[str]:
    """Return the tables of the package's installed apps."""
    models = [model._meta for config in _own_apps() for model in config.get_models(include_auto_created=True)]
    return sorted({each.db_table for each in models if each.managed and not each.proxy})


def _own_apps() -> list[AppConfig]:
    return [config for config in apps.get_app_configs() if config.name.partition(".")[0] == _PACKAGE]


def _names(label: str) -> Iterator[str]:
    """Yield the names of an app's migrations, as Django finds them."""
    module, _is_chosen = MigrationLoader.migrations_module(label)
    with suppress(ModuleNotFoundError):
        found = find_spec(module) if module else None
        for _finder, name, is_package in iter_modules((found and found.submodule_search_locations) or ()):
            if not is_package and name[0] not in "_~":
                yield name
