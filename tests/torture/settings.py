"""The settings of every process of a torture. The environment names the servers and the folder."""

from __future__ import annotations

import json
import os

from psycopg import IsolationLevel

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES, INSTALLED_APPS
from tests.support.parent import end_with_parent
from tests.torture.resolver import take_its_place

SECRET_KEY = "only-for-tests"
DEBUG = False
INSTALLED_APPS = [*INSTALLED_APPS, "tests.torture.app"]
DATABASES["default"]["CONN_MAX_AGE"] = None
DATABASES["default"]["OPTIONS"]["connect_timeout"] = 3
DATABASES["default"]["OPTIONS"]["isolation_level"] = IsolationLevel[os.environ["TORTURE_ISOLATION"]]
DELAYQ = {"REDIS": os.environ["REDIS_URL"], **json.loads(os.environ["TORTURE_DELAYQ"])}

# The host of Redis has a name.
take_its_place()
# No process survives the torture.
end_with_parent()
