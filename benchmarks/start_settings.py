"""Settings of small projects for ``benchmarks.start``: BENCH_PROJECT is bare, app, admin or console."""

from __future__ import annotations

import os

PROJECT = os.environ.get("BENCH_PROJECT", "bare")
SECRET_KEY = "only for measurements"
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
DELAYQ = {"REDIS": "redis://127.0.0.1:6379/0"}
if PROJECT in ("admin", "console"):
    INSTALLED_APPS += ["django.contrib.admin", "django.contrib.messages", "django.contrib.sessions"]
    ROOT_URLCONF = "benchmarks.start_urls"
    MIDDLEWARE = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ]
    TEMPLATES = [
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
            "OPTIONS": {
                "context_processors": [
                    "django.template.context_processors.request",
                    "django.contrib.auth.context_processors.auth",
                    "django.contrib.messages.context_processors.messages",
                ]
            },
        }
    ]
if PROJECT in ("app", "console"):
    INSTALLED_APPS.append("django_delayq")
if PROJECT == "console":
    INSTALLED_APPS.append("django_delayq.console")
