"""The backend, which Django finds by its name."""

from __future__ import annotations

from django.db.backends.sqlite3 import base


class DatabaseWrapper(base.DatabaseWrapper):
    vendor = "mysql"
    display_name = "MySQL"
