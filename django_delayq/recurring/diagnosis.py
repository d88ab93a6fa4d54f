"""The finding about schedules, for ``delayq_check`` and the console: which messages are not made, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from django.db.models import Q
from django.utils.translation import gettext as _

from ..core.findings import Finding, Level
from ..inspector.numbers import CAPS
from ..models.workers import WorkerList, WorkerState, seen_lately
from . import declarations, schedules
from .definition import ROLE
from .models import Declarations, Schedule
from .schedule_tuning import tuning


def find(using: str, workers: WorkerList) -> Iterator[Finding]:
    """Find out whether workers make the messages of all schedules. Without a worker the finding *Workers* says all."""
    if not workers.of(WorkerState.ALIVE):
        return
    unwritten = set(declarations.collect_for(using)[0])
    if unwritten:
        unwritten.difference_update(Schedule.objects.using(using).filter(declared=True).values_list("pk", flat=True))
    # Each process with the role announces its declarations, even if it has none.
    if not Declarations.objects.using(using).filter(seen_lately(workers.at, tuning.forgotten_after)).exists():
        is_active = Q(paused=False) | Q(resumes_at__lte=workers.at)
        active = Schedule.objects.using(using).filter(is_active, ended=False).values_list("pk", flat=True)
        if wanted := {*active[: CAPS.named + 1], *unwritten}:
            text = _("No live worker has the role %(role)s, so no messages are made for: %(names)s.")
            yield _warning(text, wanted)
        return
    if behind := schedules.due(using, CAPS.named + 1, workers.at, since=tuning.late):
        yield _warning(_("Workers make no messages, and log the reason, for: %(names)s."), behind)
    if silent := schedules.silent(using, workers.at):
        text = _(
            "The next times of these schedules count as past, as after a clock that was ahead, and get no message;"
            " pause and resume them: %(names)s."
        )
        yield _warning(text, silent)
    if unwritten:
        text = _(
            "This code declares schedules that no worker has written, because its code is older or the name belongs to"
            " a schedule made at run time: %(names)s."
        )
        yield _warning(text, unwritten)


def _warning(text: str, names: Collection[str]) -> Finding:
    named = ", ".join(sorted(names)[: CAPS.named]) + (" …" if len(names) > CAPS.named else "")
    return Finding("Schedules", Level.WARN, text % {"names": named, "role": ROLE}, link="schedules")
