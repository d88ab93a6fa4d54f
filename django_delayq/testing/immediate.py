"""``DELAYQ["TESTING"] = "immediate"``: a message that is due runs at the call that made it so."""

from __future__ import annotations

from collections.abc import Sequence

from ..broker import publisher
from ..models import Message
from . import helper, setting, topics
from .deliverer import Deliverer, at_work, raise_error

# More deliveries than this from one call do not end.
MOST = 1000


def run_if_wanted(using: str, ids: Sequence[int]) -> None:
    """Run the messages if the settings of the project, which a test may change, say so."""
    if setting.mode() == "immediate":
        run(using, ids)


publisher.run_at_once = run_if_wanted


def run(using: str, ids: Sequence[int]) -> None:
    """Run those of the messages that are due, in this thread and in the caller's transaction. Raise the first error.

    What a handler makes due runs when the handler has ended. A message that is due later waits, as in life.
    """
    deliverer = at_work()
    if deliverer is not None:
        deliverer.waiting += ids
        return
    for topic in Message.objects.using(using).filter(pk__in=ids).values_list("topic", flat=True).distinct():
        topics.check(topic, helper.elsewhere())
    deliverer = Deliverer(using)
    deliverer.waiting += ids
    made = 0
    with deliverer.working():
        while deliverer.waiting:
            delivery = deliverer.claim(deliverer.waiting[0])
            if delivery is None:
                del deliverer.waiting[0]
                continue
            made += 1
            if made > MOST:
                raise RuntimeError(f"one call led to {MOST} deliveries, and a handler still makes messages due")
            raise_error(deliverer.run(delivery))
