"""Registers recurring messages: two services for workers with a role, a finding, and a system check of declarations."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError

from .. import extensions
from ..checks import TAG
from ..core.actors import acting_as
from ..core.exceptions import InvalidMessage, KeyConflict
from ..extensions import Service, WorkerExtension
from ..project import conf
from ..record import reads
from ..record.sql.moves import writing
from ..record.sql.troubles import Trouble, trouble
from . import declarations
from .definition import ROLE
from .schedule_tuning import tuning

if TYPE_CHECKING:
    from ..core.findings import Finding
    from ..models.workers import WorkerList
    from .models import Declarations

logger = logging.getLogger("django_delayq")


def check_declarations(app_configs: Sequence[Any] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check the schedules that the code declares: ``delayq_recurring.E001``."""
    _settings, problems = conf.parse(conf.given())
    if problems:
        # No schedule can be checked until the settings are right: their own check says what is wrong.
        return []
    _found, mistakes = declarations.collect()
    places: dict[str, list[str]] = {}
    for mistake in mistakes:
        places.setdefault(mistake.reason, []).append(mistake.place)
    return [
        checks.Error(
            f"The schedule of {' and of '.join(theirs)} is wrong: {reason}.",
            hint="Correct the arguments of its @recurring, or install what is missing.",
            id="delayq_recurring.E001",
        )
        for reason, theirs in places.items()
    ]


# The errors of a schedule whose definition is wrong.
WRONG = (InvalidMessage, ImproperlyConfigured, KeyConflict, OverflowError)


class Scheduler(Service):
    """Makes the occurrences of all schedules. Several processes may do so at once; a leader saves the others work."""

    name = "scheduler"
    is_shared = True

    def __init__(self, using: str, worker: str) -> None:
        self.using = using
        self.actor = f"worker:{worker}"
        self._failing: set[str] = set()
        self._prune_at = 0.0

    def tick(self) -> float:
        """Advance the schedules whose time has come. Return the seconds until the next one, within limits."""
        from . import schedules

        # Schedules that failed before may be the most urgent ones: they must not crowd out the others.
        names = schedules.due(self.using, tuning.advanced_together + len(self._failing), free=True)
        with acting_as(self.actor):
            failed = self._advance(names)
        if time.monotonic() >= self._prune_at:
            self._prune_at = time.monotonic() + tuning.prune_interval
            schedules.prune(self.using)
        # One transaction may have made some of them only, and the time of another may have come during this look.
        left = schedules.due(self.using, 1 + len(self._failing), free=True) if failed < len(names) else []
        if not self._failing.issuperset(left):
            return 0.0
        waits = [tuning.look_interval]
        if (later := schedules.until_next(self.using)) is not None:
            waits.append(later + tuning.after_due)
        if (late := schedules.late_for(self.using)) is not None:
            # The schedule waits for a delivery, or cannot be advanced, perhaps for long: the later it is, the longer is
            # the time until the next look.
            waits.append(min(tuning.waiting_interval, max(tuning.after_due, late)))
        return min(waits)

    def _advance(self, names: list[str]) -> int:
        """Advance these schedules, together if possible. Return how many of them cannot be advanced."""
        from . import schedules

        # Schedules that failed before go one by one, so that the others can go together.
        alone = [name for name in names if name in self._failing]
        together = [name for name in names if name not in self._failing]
        try:
            if together:
                schedules.advance(self.using, *together)
        except Exception as error:
            if _concerns_all(error):
                raise
            # The transaction was rolled back, and any of them may be the cause.
            alone = names
        return sum(not self._advance_alone(name) for name in alone)

    def _advance_alone(self, name: str) -> bool:
        """Advance one schedule. Return False, and log it the first time, when it cannot be advanced."""
        from . import schedules

        try:
            schedules.advance(self.using, name)
        except Exception as error:
            if _concerns_all(error):
                raise
            if name not in self._failing:
                self._failing.add(name)
                text = "Schedule %s makes no messages until it is corrected: %s"
                logger.error(text, name, error, exc_info=_foreign(error))
            return False
        self._failing.discard(name)
        return True


class Declarer(Service):
    """Keeps the declared schedules as the code of live workers has them.

    Each process does so for the declarations of its own version. Of two versions that run at once, as during a deploy,
    the one that appeared later defines a schedule; a schedule goes when no live worker declares it any more. A version
    that disappears and comes back, as after a rollback, has appeared later; but not where its processes lived on, and
    could not announce it, as during an outage of the database.
    """

    name = "declarer"

    def __init__(self, using: str, worker: str) -> None:
        self.using = using
        self.actor = f"worker:{worker}"
        # When this process announced its declarations last, and when it could do so again after an outage, by the
        # record's clock.
        self._announced_at: datetime | None = None
        self._back_at: datetime | None = None
        self._logged: set[str] = set()

    def tick(self) -> float:
        """Announce the declarations of this process, and write those schedules that it defines."""
        with acting_as(self.actor):
            self._write()
        return tuning.announce_interval

    def _write(self) -> None:
        """Announce the declarations of this process, write the schedules that it defines, and delete forgotten ones."""
        from . import schedules
        from .models import Schedule

        declared, mistakes = declarations.collect_for(self.using)
        for mistake in mistakes:
            self._log(f"The schedule of {mistake.place} is wrong, and makes no messages: {mistake.reason}")
        mine = declarations.fingerprint(declared)
        # The definitions in the database. They are read first: so this process does not undo what a newer version
        # writes meanwhile.
        present = {row.pk: row.definition for row in Schedule.objects.using(self.using).filter(declared=True)}
        live = self._announced(mine, sorted(declared))
        for name, definition in declared.items():
            newest = max((row for row in live if name in row.names), key=lambda row: (row.since, row.fingerprint))
            if newest.fingerprint != mine or present.get(name) == definition:
                continue
            try:
                schedules.declare(self.using, name, definition)
            except Exception as error:
                if _concerns_all(error):
                    raise
                text = f"Schedule {name} cannot be written as the code declares it: {error}"
                self._log(text, error=_foreign(error))
        own = next(row for row in live if row.fingerprint == mine)
        # After an outage of all workers, those with other declarations get the time to announce theirs.
        if own.seen_at - max(own.since, self._back_at or own.since) > timedelta(seconds=tuning.forgotten_after):
            known = {name for row in live for name in row.names}
            for name in schedules.retire(self.using, present.keys() - known):
                logger.warning("Schedule %s was deleted: no live worker declares it any more", name)

    def _announced(self, mine: str, names: list[str]) -> list[Declarations]:
        """Note that this process is alive with its declarations; return all that live processes have announced."""
        from ..models.workers import seen_lately
        from .models import Declarations

        rows = Declarations.objects.using(self.using)
        now, last = reads.now(self.using), self._announced_at
        live = rows.filter(seen_lately(now, tuning.forgotten_after))
        with writing(self.using):
            if not live.filter(fingerprint=mine).update(seen_at=now):
                values = {"names": names, "since": now, "seen_at": now}
                kept = values if last is None else {"seen_at": now}
                rows.update_or_create(fingerprint=mine, defaults=kept, create_defaults=values)
                rows.filter(seen_at__lt=now - tuning.declarations_kept).delete()
        if last is not None and abs(now - last) > timedelta(seconds=tuning.forgotten_after):
            # During the outage no other process could announce its declarations either.
            self._back_at = now
        self._announced_at = now
        return list(live)

    def _log(self, text: str, *, error: Exception | None = None) -> None:
        if text not in self._logged:
            self._logged.add(text)
            logger.error(text, exc_info=error)


def _concerns_all(error: Exception) -> bool:
    """Tell whether an error is one of the database itself, and not of a project's query for one schedule."""
    kind = trouble(error)
    # SQLite has no error of its own for a missing table.
    is_down = isinstance(error, OperationalError | InterfaceError) and kind != Trouble.OUTDATED
    return is_down or kind == Trouble.READ_ONLY


def _foreign(error: Exception) -> Exception | None:
    """Return an error of the project's own code, such as its middleware: the log shows where that came from."""
    return None if isinstance(error, WRONG) else error


def why_nothing(name: str, error: Exception) -> str:
    """Return in words why nothing was done to a schedule. Log an error of the project's own with its traceback.

    Raises the error again when it concerns all schedules.
    """
    from .models import Schedule

    if _concerns_all(error):
        raise error
    if isinstance(error, Schedule.DoesNotExist):
        return "somebody has just deleted it"
    if _foreign(error) is None:
        return str(error)
    logger.error("Nothing was done to schedule %s", name, exc_info=error)
    return f"{type(error).__name__}: {error}"


class RecurringExtension(WorkerExtension):
    """Adds the two services to worker processes with the role ``scheduler``."""

    def services(self, roles: frozenset[str]) -> Iterator[Service]:
        if ROLE in roles:
            yield Declarer(self.using, self.worker)
            yield Scheduler(self.using, self.worker)


def register() -> None:
    """Register the extension. Called when the apps are ready; imports tables when needed."""
    extensions.add_to_workers(RecurringExtension, roles=(ROLE,))
    extensions.add_to_check(_findings)
    checks.register(check_declarations, TAG)


def _findings(using: str, workers: WorkerList) -> Iterator[Finding]:
    from . import diagnosis

    return diagnosis.find(using, workers)
