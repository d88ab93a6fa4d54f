"""The words of pages for the verbs of ``core/verbs.py``: labels, effects and outcomes; and the forms of the actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.utils.formats import number_format
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy, pgettext_lazy

from ...api import actions
from ...core.states import State
from ...core.verdicts import DONE, Verdict
from .forms import MoveForm, ReasonForm, RequeueForm, RescheduleForm, SpreadForm

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as Text

UNCHANGED = _("unchanged")


@dataclass(frozen=True, slots=True)
class ConsoleAction:
    """The words and the form of an action on pages. ``effect`` says what it does to a message."""

    action: actions.Action
    label: Text
    # The title of the confirmation page.
    question: Text
    effect: Text
    form: type[ReasonForm] = ReasonForm

    @property
    def name(self) -> str:
        """The name of the verb: in addresses, and of the operation that does it."""
        return self.action.name

    @property
    def final(self) -> bool:
        """True for an action that nobody can undo."""
        return self.action.verb.is_final

    def effect_on(self, state: State) -> Text:
        """Return what the action does to a message in this state."""
        if self.action is actions.CANCEL and state == State.RUNNING:
            return _("will be asked to stop and not be retried")
        return self.effect if state in self.action.states else UNCHANGED


_TABLE = (
    ConsoleAction(
        actions.CANCEL,
        pgettext_lazy("verb", "Cancel"),
        _("Cancel messages"),
        _("will be cancelled"),
    ),
    ConsoleAction(
        actions.RESCHEDULE,
        _("Reschedule"),
        _("Reschedule messages"),
        _("will be moved to the new time"),
        RescheduleForm,
    ),
    ConsoleAction(
        actions.RUN,
        _("Run now"),
        _("Run messages now"),
        _("will be due at once"),
        SpreadForm,
    ),
    ConsoleAction(
        actions.MOVE,
        pgettext_lazy("verb", "Move"),
        _("Move messages"),
        _("will wait in the queue and with the priority that you give"),
        MoveForm,
    ),
    ConsoleAction(
        actions.REQUEUE,
        _("Requeue"),
        _("Requeue messages"),
        _("will be scheduled again, unless another message holds the same key"),
        RequeueForm,
    ),
    ConsoleAction(
        actions.PURGE,
        _("Purge"),
        _("Purge finished messages"),
        _("will be deleted, with its log"),
    ),
)
# By name, in the order in which pages offer them.
CONSOLE_ACTIONS = {action.name: action for action in _TABLE}

# Everything that the audit may name: the actions on messages, and the other actions of users and commands.
LABELS: dict[str, Text] = {
    **{action.name: action.label for action in CONSOLE_ACTIONS.values()},
    "pause": _("Pause"),
    "resume": _("Resume"),
    "override": _("Override limit"),
    "reset": _("Reset limit"),
    "stop": _("Stop"),
    "restore": _("Restore"),
    "reveal": _("Reveal"),
    "repeat": _("Repeat"),
    "export": _("Export"),
    "acknowledge": _("Acknowledge"),
    "notice": _("Take back an acknowledgement"),
}

# A check changes nothing, so it is named by operations only, and not by the audit.
_CHECK: dict[str, Text] = {"check": pgettext_lazy("verb", "Check")}


def label(name: str) -> str:
    """Return the name of an action in words."""
    return str((LABELS | _CHECK).get(name, name))


_OUTCOMES: dict[str, Any] = {
    Verdict.PURGED.value: ngettext_lazy("%(shown)s purged", "%(shown)s purged", "count"),
    Verdict.CANCELLED.value: ngettext_lazy("%(shown)s cancelled", "%(shown)s cancelled", "count"),
    Verdict.REQUESTED.value: ngettext_lazy(
        "%(shown)s running (asked to stop)", "%(shown)s running (asked to stop)", "count"
    ),
    Verdict.OUTCOME_UNKNOWN.value: ngettext_lazy(
        "%(shown)s cancelled, but an earlier delivery may have had its effect",
        "%(shown)s cancelled, but earlier deliveries may have had their effects",
        "count",
    ),
    Verdict.RESCHEDULED.value: ngettext_lazy("%(shown)s rescheduled", "%(shown)s rescheduled", "count"),
    Verdict.MOVED.value: ngettext_lazy("%(shown)s moved", "%(shown)s moved", "count"),
    Verdict.REQUEUED.value: ngettext_lazy("%(shown)s requeued", "%(shown)s requeued", "count"),
    Verdict.TOO_LATE.value: ngettext_lazy("%(shown)s too late", "%(shown)s too late", "count"),
    Verdict.KEY_TAKEN.value: ngettext_lazy(
        "%(shown)s not requeued: another message holds its key",
        "%(shown)s not requeued: other messages hold their keys",
        "count",
    ),
    Verdict.REFERRED_TO.value: ngettext_lazy(
        "%(shown)s not purged: another table refers to it",
        "%(shown)s not purged: other tables refer to them",
        "count",
    ),
    "changed": ngettext_lazy(
        "%(shown)s changed after the question and was left alone",
        "%(shown)s changed after the question and were left alone",
        "count",
    ),
    Verdict.NOT_FOUND.value: ngettext_lazy("%(shown)s not found", "%(shown)s not found", "count"),
    # The outcomes of a restore.
    "put": ngettext_lazy("%(shown)s put into Redis", "%(shown)s put into Redis", "count"),
    "there already": ngettext_lazy("%(shown)s already in Redis", "%(shown)s already in Redis", "count"),
    "spread": ngettext_lazy("%(shown)s given a new due time", "%(shown)s given new due times", "count"),
    Verdict.GIVEN_UP.value: ngettext_lazy("%(shown)s given up", "%(shown)s given up", "count"),
    "expired": ngettext_lazy("%(shown)s expired", "%(shown)s expired", "count"),
    "beyond": ngettext_lazy("%(shown)s due after the horizon", "%(shown)s due after the horizon", "count"),
    # The mismatches that a consistency check found.
    "missing": ngettext_lazy("%(shown)s missing in Redis", "%(shown)s missing in Redis", "count"),
    "extra": ngettext_lazy("%(shown)s only in Redis", "%(shown)s only in Redis", "count"),
    "different": ngettext_lazy("%(shown)s different in Redis", "%(shown)s different in Redis", "count"),
    "no longer scheduled": ngettext_lazy(
        "%(shown)s no longer scheduled when its turn came, or done by a worker that died",
        "%(shown)s no longer scheduled when their turn came, or done by a worker that died",
        "count",
    ),
    "exported": ngettext_lazy("%(shown)s exported", "%(shown)s exported", "count"),
    "repeated": ngettext_lazy("%(shown)s repeated", "%(shown)s repeated", "count"),
    "revealed": ngettext_lazy("%(shown)s revealed", "%(shown)s revealed", "count"),
}
_GOOD = {verdict.value for verdict in DONE}


def number(value: int) -> str:
    """Return a whole number with separators."""
    return number_format(value, force_grouping=True, use_l10n=True)


def outcomes_text(counts: Mapping[str, int]) -> str:
    """Return outcomes in words, e.g. "1,260 cancelled, 1 running (asked to stop), 2 too late"."""
    known = [name for name in _OUTCOMES if counts.get(name)]
    texts = [str(_OUTCOMES[name] % {"count": counts[name], "shown": number(counts[name])}) for name in known]
    others = [f"{number(count)} {name}" for name, count in counts.items() if count and name not in _OUTCOMES]
    return ", ".join(texts + others)


def is_all_done(counts: Mapping[str, int]) -> bool:
    """Tell whether something was done and nothing was refused."""
    given = {name for name, count in counts.items() if count}
    return bool(given) and given <= _GOOD
