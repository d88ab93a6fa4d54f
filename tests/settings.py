"""The settings of the tests, with servers of their own that start at import and end with this process.

DELAYQ_TEST_DATABASE=sqlite takes a file instead of PostgreSQL. DELAYQ_TEST_CONSOLE=0 leaves the console out.
DELAYQ_TEST_ISOLATION=serializable (or "repeatable read") asks for that level of isolation on PostgreSQL, and
DELAYQ_TEST_AUTOCOMMIT=0 makes a project that ends its transactions by hand. Processes that a test starts find the same
servers and the same database, under these settings as well as under the demo's: DATABASE_URL (or SQLITE_PATH) and
REDIS_URL say where. Where the package redis is not installed, nothing is told of a Redis.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from testproject.servers import PostgresServer, RedisServer

# Each worker of pytest-xdist takes servers of its own. It inherits the environment of the process that runs
# pytest, and the processes that it starts inherit its own: the name of the owner tells the two apart.
_OWNER = os.environ.get("PYTEST_XDIST_WORKER", "main")

HAS_REDIS = find_spec("redis") is not None
REDIS_SERVER: RedisServer | None = None
POSTGRES_SERVER: PostgresServer | None = None

if os.environ.get("DELAYQ_TEST_OWNER") != _OWNER:
    os.environ["DELAYQ_TEST_OWNER"] = _OWNER
    REDIS_SERVER = RedisServer()
    REDIS_SERVER.start()
    if HAS_REDIS:
        os.environ["REDIS_URL"] = REDIS_SERVER.url
    if os.environ.get("DELAYQ_TEST_DATABASE") == "sqlite":
        os.environ.pop("DATABASE_URL", None)
        os.environ["SQLITE_PATH"] = str(REDIS_SERVER.directory / "delayq.sqlite3")
    else:
        POSTGRES_SERVER = PostgresServer(max_prepared_transactions=1)
        POSTGRES_SERVER.start()
        os.environ["DATABASE_URL"] = POSTGRES_SERVER.url

import django  # noqa: E402

from testproject.settings import *  # noqa: E402
from testproject.settings import DATABASES, INSTALLED_APPS  # noqa: E402
from tests.support import failpoints  # noqa: E402

failpoints.install()

SECRET_KEY = "only-for-tests"
DEBUG = False
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
INSTALLED_APPS = [*INSTALLED_APPS, "django_delayq.contrib.prometheus", "django_delayq.http", "tests.app"]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
TASKS = {
    "default": {"BACKEND": "django_delayq.contrib.tasks.DelayqBackend", "QUEUES": ["default", "mails"]},
    "here": {"BACKEND": f"django{'_' if django.VERSION < (6, 0) else '.'}tasks.backends.immediate.ImmediateBackend"},
}
if os.environ.get("DELAYQ_TEST_CONSOLE") == "0":
    INSTALLED_APPS.remove("django_delayq.console")


def at_isolation(level: str) -> dict[str, Any]:
    """Return OPTIONS for a level of isolation: in transactions by Django, and in single statements by the server."""
    from psycopg import IsolationLevel

    words = level.replace(" ", "\\ ")
    return {
        "isolation_level": IsolationLevel[level.upper().replace(" ", "_")],
        "options": f"-c default_transaction_isolation={words}",
    }


if _level := os.environ.get("DELAYQ_TEST_ISOLATION"):
    DATABASES["default"]["OPTIONS"] |= at_isolation(_level)
DATABASES["default"]["AUTOCOMMIT"] = os.environ.get("DELAYQ_TEST_AUTOCOMMIT") != "0"
DATABASES["other"] = {**DATABASES["default"], "NAME": DATABASES["default"]["NAME"] + "_other"}
for _database in DATABASES.values():
    _database["CONN_MAX_AGE"] = 0
    # Without "test_": the processes that a test starts know the name only from the environment.
    _database["TEST"] = {"NAME": _database["NAME"]}
