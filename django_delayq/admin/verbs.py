"""What an operator may do to messages: what it does in each state, and how to say what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from .. import client
from ..models import Message
from ..states import State
from ..transitions import DONE, Verdict
from .forms import ReasonForm, RescheduleForm

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as Text
else:
    Text = str

UNCHANGED = _("unchanged")


@dataclass(frozen=True, slots=True)
class Verb:
    """One action. States that are not in ``effects`` stay as they are."""

    # In URLs and, as "<name>_message", in the permission.
    name: str
    label: Text
    question: Text
    effects: Mapping[State, Text]
    run: Callable[[QuerySet[Message], Mapping[str, Any]], Counter[Verdict]]
    form: type[ReasonForm] = ReasonForm

    def allowed(self, request: HttpRequest) -> bool:
        """Whether the user has the permission of this verb."""
        return request.user.has_perm(f"django_delayq.{self.name}_message")


@dataclass(frozen=True, slots=True)
class Forecast:
    """What will become of the messages that are in one state now."""

    state: State
    count: int
    effect: Text
    changes: bool


def _cancel(messages: QuerySet[Message], given: Mapping[str, Any]) -> Counter[Verdict]:
    return client.cancel_message(messages, reason=given["reason"])


def _reschedule(messages: QuerySet[Message], given: Mapping[str, Any]) -> Counter[Verdict]:
    return client.reschedule_message(messages, due=given["due"], delay=given["delay"], reason=given["reason"])


def _run_now(messages: QuerySet[Message], given: Mapping[str, Any]) -> Counter[Verdict]:
    return client.run_message_now(messages, reason=given["reason"])


def _requeue(messages: QuerySet[Message], given: Mapping[str, Any]) -> Counter[Verdict]:
    return client.requeue_message(messages, reason=given["reason"])


_AGAIN = _("will be scheduled again, due at once, unless a live message has the same key")

CANCEL = Verb(
    "cancel",
    _("Cancel"),
    _("Cancel messages"),
    {State.SCHEDULED: _("will be cancelled"), State.RUNNING: _("will be asked to stop, no retry follows")},
    _cancel,
)
RESCHEDULE = Verb(
    "reschedule",
    _("Reschedule"),
    _("Reschedule messages"),
    {State.SCHEDULED: _("will be moved to the new time")},
    _reschedule,
    RescheduleForm,
)
RUN = Verb(
    "run",
    _("Run now"),
    _("Run messages now"),
    {State.SCHEDULED: _("will be due at once")},
    _run_now,
)
REQUEUE = Verb(
    "requeue",
    _("Requeue"),
    _("Requeue messages"),
    {State.DEAD: _AGAIN, State.EXPIRED: _AGAIN, State.CANCELLED: _AGAIN},
    _requeue,
)
VERBS = {verb.name: verb for verb in (CANCEL, RESCHEDULE, RUN, REQUEUE)}


def forecast(verb: Verb, states: Iterable[str]) -> list[Forecast]:
    """How many messages are in which state, and what the verb will do to them."""
    counts = Counter(states)
    return [
        Forecast(state, counts[state], verb.effects.get(state, UNCHANGED), state in verb.effects)
        for state in State
        if counts[state]
    ]


_OUTCOMES: dict[Verdict, Any] = {
    Verdict.CANCELLED: ngettext_lazy("%(count)d cancelled", "%(count)d cancelled", "count"),
    Verdict.REQUESTED: ngettext_lazy("%(count)d requested (running)", "%(count)d requested (running)", "count"),
    Verdict.OUTCOME_UNKNOWN: ngettext_lazy(
        "%(count)d cancelled, but an earlier delivery may have had its effect",
        "%(count)d cancelled, but earlier deliveries may have had their effects",
        "count",
    ),
    Verdict.RESCHEDULED: ngettext_lazy("%(count)d rescheduled", "%(count)d rescheduled", "count"),
    Verdict.REQUEUED: ngettext_lazy("%(count)d requeued", "%(count)d requeued", "count"),
    Verdict.TOO_LATE: ngettext_lazy("%(count)d too late", "%(count)d too late", "count"),
    Verdict.KEY_TAKEN: ngettext_lazy(
        "%(count)d not: a live message has its key", "%(count)d not: live messages have their keys", "count"
    ),
    Verdict.NOT_FOUND: ngettext_lazy("%(count)d not found", "%(count)d not found", "count"),
}


def outcome(verdicts: Mapping[Verdict, int]) -> str:
    """The verdicts in words, e.g. "3 cancelled, 1 requested (running), 2 too late"."""
    return ", ".join(str(_OUTCOMES[v] % {"count": verdicts[v]}) for v in _OUTCOMES if verdicts.get(v))


def is_all_done(verdicts: Mapping[Verdict, int]) -> bool:
    """Whether something was done, and nothing was refused."""
    given = {verdict for verdict, count in verdicts.items() if count}
    return bool(given) and given <= DONE
