"""``DELAYQ["TESTING"]``: with "immediate" a message that is due runs at the call that made it so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core import checks

from ..checks import TAG, errors
from ..core import in_tests
from ..core.states import State
from ..models import Message
from ..project import conf
from . import helper
from .deliverer import MOST, Deliverer, at_work, check_topic, raise_error

MODES = ("manual", "immediate")


def mode() -> str | None:
    """Return the setting. Raises ``ImproperlyConfigured`` for a word that it does not know."""
    conf.insist(problems())
    word = conf.section("TESTING")
    return None if word is None else str(word)


def problems() -> list[conf.Problem]:
    """Return what is wrong with the setting."""
    if conf.section("TESTING") in (None, *MODES):
        return []
    return [conf.Problem("E003", "DELAYQ['TESTING'] is impossible.", f"must be one of {', '.join(MODES)}, or None.")]


def check_setting(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the setting: ``delayq.E003``."""
    return errors(problems())


def check_deployment(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check what must not be in production: ``delayq.W001``. Only ``check --deploy`` asks."""
    if conf.section("TESTING") is None:
        return []
    hint = "Leave it to the settings of tests: it takes Redis away, and may run handlers where messages are scheduled."
    return [checks.Warning("DELAYQ['TESTING'] is set.", hint=hint, id="delayq.W001")]


def register() -> None:
    """Register the checks with Django. To call this again does no harm."""
    checks.register(check_setting, TAG)
    checks.register(check_deployment, TAG, deploy=True)


def run_if_wanted(using: str, ids: Sequence[int]) -> None:
    """Run the messages if the settings of the project, which a test may change, say so."""
    if mode() == "immediate":
        run(using, ids)


in_tests.run_at_once = run_if_wanted


def run(using: str, ids: Sequence[int]) -> None:
    """Run those of the messages that are due, in this thread and in the caller's transaction. Raise the first error.

    What a handler makes due runs when the handler has ended. A message that is due later waits, as in production.
    """
    waiting = [(using, message_id) for message_id in ids]
    if outer := at_work():
        outer.waiting += waiting
        return
    made = 0
    while waiting:
        deliverer = Deliverer(waiting[0][0])
        deliverer.waiting = waiting
        with deliverer.working():
            while waiting and waiting[0][0] == deliverer.using:
                delivery = deliverer.start(waiting[0][1])
                if delivery is None:
                    _check_topic(*waiting.pop(0))
                    continue
                made += 1
                if made > MOST:
                    raise RuntimeError(f"one call led to {MOST} deliveries, and a handler still makes messages due")
                raise_error(*deliverer.run([delivery]))


def _check_topic(using: str, message_id: int) -> None:
    """Raise ``UnknownTopic`` for a message that waits because no handler receives it."""
    rows = Message.objects.using(using).filter(pk=message_id, state=State.SCHEDULED)
    for topic in rows.values_list("topic", flat=True):
        check_topic(topic, helper.elsewhere())
