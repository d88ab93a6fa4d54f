"""Settings of the demo: the shop runs fast."""

from __future__ import annotations

import os

from testproject.settings import *  # noqa: F403
from testproject.settings import DELAYQ

# The shop runs this many times faster than real time: a quarter of an hour lasts 3.75 seconds.
SHOP_SPEED = 240
SHOP_CALLBACK_URL = os.environ.get("SHOP_CALLBACK_URL", "")

# In a Redis that REDIS_URL names, the demo deletes keys with this prefix and no others.
DELAYQ["PREFIX"] = "delayq-demo"
