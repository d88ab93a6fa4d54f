"""Settings of the demo shop. DATABASE_URL and REDIS_URL name servers of your own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def postgres(url: str) -> dict[str, Any]:
    """Return the settings for a PostgreSQL URL, read as libpq does: with Unix sockets and options."""
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(url)
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    known = {ours: str(given.pop(theirs, None) or "") for theirs, ours in names.items()}
    return {"ENGINE": "django.db.backends.postgresql", **known, "OPTIONS": given}


def sqlite(path: str | Path) -> dict[str, Any]:
    """Return settings with which several processes can use SQLite: readers never wait, writers take turns."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(path),
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL",
        },
    }


SECRET_KEY = "a-demo-key-that-everybody-knows"
DEBUG = os.environ.get("DEBUG", "1") == "1"
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "testserver"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_delayq",
    "django_delayq.console",
    "django_delayq.recurring",
    "testproject.shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

ROOT_URLCONF = "testproject.urls"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DATABASES = {
    "default": postgres(os.environ["DATABASE_URL"])
    if os.environ.get("DATABASE_URL")
    else sqlite(os.environ.get("SQLITE_PATH") or HERE / "db.sqlite3"),
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

CACHES: dict[str, dict[str, Any]] = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
}
DELAYQ: dict[str, Any] = {"REDIS": None}

if os.environ.get("REDIS_URL"):
    CACHES["delayq"] = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": os.environ["REDIS_URL"],
    }
    DELAYQ["REDIS"] = "delayq"

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "static/"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "short": {
            "format": "{asctime} {levelname:<7} {name}: {message}",
            "style": "{",
            "datefmt": "%H:%M:%S",
        },
    },
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": "short"},
    },
    "loggers": {
        "django_delayq": {"handlers": ["console"], "level": "INFO"},
    },
}
