"""Settings that the Django peers share."""

from __future__ import annotations

import os
from urllib.parse import urlsplit


def database() -> dict[str, object]:
    """Return DATABASE_URL as a database of Django's settings."""
    url = urlsplit(os.environ["DATABASE_URL"])
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.path[1:],
        "USER": url.username,
        "HOST": url.hostname,
        "PORT": url.port,
        # Their workers close old connections after each task; without this setting, every connection.
        "CONN_MAX_AGE": None,
    }
