"""Finds the migrations of the queue, and of its installed apps that have tables, that are not applied."""

from __future__ import annotations

from django.apps import apps
from django.db import connections
from django.db.migrations.executor import MigrationExecutor

_PACKAGE = __package__.partition(".")[0]


def pending_migrations(using: str) -> list[str]:
    """Return the migrations of the package's installed apps that are not applied, each as ``app_label.name``."""
    executor = MigrationExecutor(connections[using])
    ours = [config for config in apps.get_app_configs() if config.name.partition(".")[0] == _PACKAGE]
    labels = {config.label for config in ours if any(config.get_models())}
    newest = [node for node in executor.loader.graph.leaf_nodes() if node[0] in labels]
    without = sorted(labels - {label for label, _name in newest})
    pending = [str(migration) for migration, _backwards in executor.migration_plan(newest)]
    return [f"{label} has none" for label in without] + pending
