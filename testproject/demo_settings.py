"""Settings of the demo: the shop in a hurry."""

from __future__ import annotations

import os

from testproject.settings import *  # noqa: F403
from testproject.settings import DELAYQ

# A quarter of an hour lasts 3.75 seconds.
SHOP_SPEED = 240
SHOP_CALLBACK_URL = os.environ.get("SHOP_CALLBACK_URL", "")

# In a Redis of one's own the demo wipes these keys and no others.
DELAYQ["PREFIX"] = "delayq-demo"
