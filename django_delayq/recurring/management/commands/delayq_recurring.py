"""``manage.py delayq_recurring``: list schedules, run them now, pause and resume them."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from .... import signals
from ....core.clock import iso
from ....core.exceptions import InvalidMessage
from ....core.names import near
from ....inspector.worker_list import asked
from ....management import _common as common
from ....models import Message
from ....record import reads
from ....record.sql.moves import writing
from ... import definition
from ...models import Schedule
from ...schedules import pause_schedule, resume_schedule, run_schedule
from ...services import why_nothing
from ...times import shown

# The next times that the list shows of each schedule.
TIMES_SHOWN = 3


class Command(common.DelayqCommand):
    exits = (0, 1, 2, 4, 69, 78)
    help = (
        "List schedules with their next times, make a message of a schedule that is due now, or pause and resume "
        "schedules. A paused schedule makes no messages; its waiting messages are cancelled."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "action", choices=("list", "run", "pause", "resume"), metavar="ACTION", help="list, run, pause or resume"
        )
        parser.add_argument(
            "names", nargs="*", type=_name, metavar="NAME", help="the names of schedules (list: default all)"
        )
        common.add_end(parser, "pause: ", "recorded with the action")
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        names = sorted(set(options["names"]))
        if options["action"] != "pause" and options["until"] is not None:
            raise common.wrong_usage("--until belongs to pause.")
        rows = Schedule.objects.using(using)
        schedules = list(rows.filter(pk__in=names) if names else rows)
        if options["action"] == "list":
            self._list(using, schedules, options)
        elif names:
            self._act_on(using, schedules, options)
        else:
            raise common.wrong_usage("Name the schedules; delayq_recurring list shows them.")
        if missing := set(names) - {schedule.pk for schedule in schedules}:
            known = set(rows.values_list("pk", flat=True))
            unknown = ", ".join(asked({repr(name): near(name, known) for name in sorted(missing)}))
            raise CommandError(f"There is no schedule {unknown}.", returncode=common.PARTIAL)

    def _act_on(self, using: str, schedules: list[Schedule], options: dict[str, Any]) -> None:
        done = {}
        for schedule in schedules:
            try:
                # The action and its audit, or neither.
                with writing(using):
                    answer = self._act(using, schedule.pk, options)
                done[schedule.pk] = answer
            except Exception as error:  # noqa: BLE001
                self.stderr.write(f"{schedule.pk}: {why_nothing(schedule.pk, error)}", self.style.WARNING)
        if options["json"]:
            self.say_json(database=using, **{options["action"]: done})
        else:
            for name, text in _words(options["action"], done).items():
                self.say(f"{name}: {text}")
        if left := ", ".join(schedule.pk for schedule in schedules if schedule.pk not in done):
            raise CommandError(f"Nothing was done to these schedules: {left}.", returncode=common.PARTIAL)

    def _act(self, using: str, name: str, options: dict[str, Any]) -> Any:
        """Act on one schedule. Return the id of the message that it made, or whether it was changed."""
        action, message_id = options["action"], None
        answer: bool | int
        if action == "run":
            answer = message_id = run_schedule(name, using=using).pk
        elif action == "pause":
            answer = pause_schedule(name, using=using, **common.end_of(options))
        else:
            answer = resume_schedule(name, using=using)
        if answer:
            facts = {"message_id": message_id, "reason": options["reason"]}
            signals.emit_action(Message, using, f"{action} schedule", name, **facts)
        return answer

    def _list(self, using: str, schedules: list[Schedule], options: dict[str, Any]) -> None:
        now = reads.now(using)
        if options["json"]:
            self.say_json(
                database=using,
                schedules=[
                    {
                        **{field: getattr(schedule, field) for field in FACTS},
                        "paused": schedule.is_paused(now),
                        "resumes_at": iso(schedule.resumes_at),
                        "next": [iso(at) for at in self._next(schedule, now)],
                    }
                    for schedule in schedules
                ],
            )
            return
        if not schedules and not options["names"]:
            self.say("There are no schedules. Workers write those that the code declares when they start.")
        for schedule in schedules:
            state = "ended" if schedule.ended else "active"
            if schedule.is_paused(now):
                state = "paused" + (f" until {iso(schedule.resumes_at)}" if schedule.resumes_at else "")
            whose = "declared in code" if schedule.declared else "made at run time"
            facts = (schedule.rule, f"topic {schedule.topic}", f"missed: {schedule.missed}", state, whose)
            self.say(f"{schedule.pk}: {', '.join(facts)}")
            for at in self._next(schedule, now):
                self.say(f"  {shown(at, schedule.time_zone)}")

    def _next(self, schedule: Schedule, now: Any) -> list[Any]:
        try:
            return schedule.next_times(TIMES_SHOWN, after=now)
        except (InvalidMessage, ImproperlyConfigured) as error:
            self.stderr.write(f"{schedule.pk}: {error}", self.style.WARNING)
            return []


FACTS = (
    *("name", "topic", "queue", "priority", "cron", "every", "time_zone", "missed", "expires"),
    *("declared", "ended", "message_id"),
)


def _name(text: str) -> str:
    return common.checked(definition.name, text)


def _words(action: str, done: dict[str, Any]) -> dict[str, str]:
    if action == "run":
        return {name: f"message {pk} is due now" for name, pk in done.items()}
    changed, unchanged = ("paused", "was paused already") if action == "pause" else ("resumed", "was not paused")
    return {name: changed if was else unchanged for name, was in done.items()}
