"""The handlers of both versions, and that of a topic which only the new version knows."""

from __future__ import annotations

import os

from django_delayq import handler
from django_delayq.project.registry import Delivered
from tests.app.models import Effect

VERSION = os.environ.get("UPGRADE_VERSION", "")


@handler("upgrade.order", transactional=True)
def leave(message: Delivered) -> None:
    """Leave an effect that says which version delivered."""
    Effect.objects.create(message_id=message.id, delivery=message.deliveries, note=VERSION)


if VERSION == "new":
    handler("upgrade.news", transactional=True)(leave)
