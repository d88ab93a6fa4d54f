"""What an operator may do to messages: what it does in each state, and how to say what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy, pgettext_lazy

from ... import conf
from ...states import FINAL, State
from ...verdicts import DONE, Verdict
from .forms import ReasonForm, RescheduleForm, SpreadForm

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as Text
else:
    Text = str

UNCHANGED = _("unchanged")


@dataclass(frozen=True, slots=True)
class Verb:
    """One action. States that are not in ``effects`` stay as they are."""

    # In URLs, of the work that does it and, as "<name>_message", of the permission.
    name: str
    label: Text
    question: Text
    effects: Mapping[State, Text]
    form: type[ReasonForm] = ReasonForm
    # What it does cannot be undone: it always asks for the number.
    final: bool = False

    def allowed(self, request: HttpRequest) -> bool:
        """Whether the user has the permission of this verb, and the admin lets anybody change anything."""
        return not conf.get().ADMIN_READ_ONLY and request.user.has_perm(f"django_delayq.{self.name}_message")


def may_bulk(request: HttpRequest) -> bool:
    """Whether the user may act on more than a few messages, and on all that a search finds."""
    return not conf.get().ADMIN_READ_ONLY and request.user.has_perm("django_delayq.bulk_message")


_AGAIN = _("will be scheduled again, unless a live message has the same key")
_GONE = _("will be deleted, with its log")

CANCEL = Verb(
    "cancel",
    pgettext_lazy("verb", "Cancel"),
    _("Cancel messages"),
    {State.SCHEDULED: _("will be cancelled"), State.RUNNING: _("will be asked to stop, no retry follows")},
)
RESCHEDULE = Verb(
    "reschedule",
    _("Reschedule"),
    _("Reschedule messages"),
    {State.SCHEDULED: _("will be moved to the new time")},
    RescheduleForm,
)
RUN = Verb(
    "run",
    _("Run now"),
    _("Run messages now"),
    {State.SCHEDULED: _("will be due at once")},
    SpreadForm,
)
REQUEUE = Verb(
    "requeue",
    _("Requeue"),
    _("Requeue messages"),
    {State.DEAD: _AGAIN, State.EXPIRED: _AGAIN, State.CANCELLED: _AGAIN},
    SpreadForm,
)
PURGE = Verb(
    "purge",
    _("Purge"),
    _("Purge finished messages"),
    {state: _GONE for state in State if state in FINAL},
    final=True,
)
VERBS = {verb.name: verb for verb in (CANCEL, RESCHEDULE, RUN, REQUEUE, PURGE)}

# Whatever else people or commands do leaves a trace too; see audit.record.
LABELS: dict[str, Text] = {
    **{verb.name: verb.label for verb in VERBS.values()},
    "pause": _("Pause"),
    "resume": _("Resume"),
    "stop": _("Stop"),
    "restore": _("Restore"),
    "reveal": _("Reveal"),
    "export": _("Export"),
}


# Changes nothing, so it is in no audit.
_CHECK: dict[str, Text] = {"check": pgettext_lazy("verb", "Check")}


def label(name: str) -> str:
    """A verb in words."""
    return str((LABELS | _CHECK).get(name, name))


_OUTCOMES: dict[str, Any] = {
    "purged": ngettext_lazy("%(shown)s purged", "%(shown)s purged", "count"),
    Verdict.CANCELLED.value: ngettext_lazy("%(shown)s cancelled", "%(shown)s cancelled", "count"),
    Verdict.REQUESTED.value: ngettext_lazy("%(shown)s requested (running)", "%(shown)s requested (running)", "count"),
    Verdict.OUTCOME_UNKNOWN.value: ngettext_lazy(
        "%(shown)s cancelled, but an earlier delivery may have had its effect",
        "%(shown)s cancelled, but earlier deliveries may have had their effects",
        "count",
    ),
    Verdict.RESCHEDULED.value: ngettext_lazy("%(shown)s rescheduled", "%(shown)s rescheduled", "count"),
    Verdict.REQUEUED.value: ngettext_lazy("%(shown)s requeued", "%(shown)s requeued", "count"),
    Verdict.TOO_LATE.value: ngettext_lazy("%(shown)s too late", "%(shown)s too late", "count"),
    Verdict.KEY_TAKEN.value: ngettext_lazy(
        "%(shown)s not: a live message has its key", "%(shown)s not: live messages have their keys", "count"
    ),
    Verdict.NOT_FOUND.value: ngettext_lazy("%(shown)s not found", "%(shown)s not found", "count"),
    # What a restore comes to.
    "put": ngettext_lazy("%(shown)s put into Redis", "%(shown)s put into Redis", "count"),
    "there already": ngettext_lazy("%(shown)s there already", "%(shown)s there already", "count"),
    "spread": ngettext_lazy("%(shown)s spread", "%(shown)s spread", "count"),
    "given up": ngettext_lazy("%(shown)s given up", "%(shown)s given up", "count"),
    "expired": ngettext_lazy("%(shown)s expired", "%(shown)s expired", "count"),
    "present": ngettext_lazy("%(shown)s there already", "%(shown)s there already", "count"),
    "beyond": ngettext_lazy("%(shown)s due later", "%(shown)s due later", "count"),
    # And a comparison.
    "missing": ngettext_lazy("%(shown)s missing in Redis", "%(shown)s missing in Redis", "count"),
    "extra": ngettext_lazy("%(shown)s only in Redis", "%(shown)s only in Redis", "count"),
    "different": ngettext_lazy("%(shown)s different", "%(shown)s different", "count"),
    "exported": ngettext_lazy("%(shown)s exported", "%(shown)s exported", "count"),
    "revealed": ngettext_lazy("%(shown)s revealed", "%(shown)s revealed", "count"),
}
_GOOD = {"purged", *(verdict.value for verdict in DONE)}


def number(value: int) -> str:
    """A whole number with separators."""
    return number_format(value, force_grouping=True, use_l10n=True)


def outcome(counts: Mapping[str, int]) -> str:
    """What came of it in words, e.g. "1,260 cancelled, 1 requested (running), 2 too late"."""
    known = [name for name in _OUTCOMES if counts.get(name)]
    said = [str(_OUTCOMES[name] % {"count": counts[name], "shown": number(counts[name])}) for name in known]
    others = [f"{number(count)} {name}" for name, count in counts.items() if count and name not in _OUTCOMES]
    return ", ".join(said + others)


def is_all_done(counts: Mapping[str, int]) -> bool:
    """Whether something was done, and nothing was refused."""
    given = {name for name, count in counts.items() if count}
    return bool(given) and given <= _GOOD
