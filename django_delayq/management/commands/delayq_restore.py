"""``manage.py delayq_restore``: fill Redis again from the record."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import InterfaceError, OperationalError

from ...core import actors
from ...core.clock import iso
from ...core.durations import brief
from ...core.exceptions import BrokerUnavailable
from ...core.states import State
from ...extensions import RestoreObservers, RestoreStart
from ...models import Message
from ...record import reads
from ...restore.engine import Restore
from ...restore.selection import Overdue, Report, Selection, Tally
from .. import _common as common

# What each choice but *run* does to overdue messages.
CHANGES = {Overdue.CANCEL: "cancel", Overdue.DEAD: "make dead", Overdue.SPREAD: "give new due times to"}


class Command(common.DelayqCommand):
    help = (
        "Put the scheduled messages of the record back into Redis, while producers and workers go on. Nothing is "
        "cleared first, and a second restore, even at the same time, changes nothing. Running messages are left to "
        "their workers. Only messages that are due within DELAYQ['HORIZON'] are put; a worker loads the later ones in "
        "time. A running worker does all this by itself within seconds after Redis was lost."
    )
    exits = (0, 1, 2, 69, 78, 130)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("ids", nargs="*", type=common.message_id, metavar="ID", help="only these messages")
        common.add_selectors(parser)
        parser.add_argument(
            "--overdue",
            type=_overdue,
            default=(Overdue.RUN, 0.0),
            metavar="{run,cancel,dead,spread=TIME}",
            help=(
                "what to do with overdue messages, which should have started more than 5 s ago. "
                "run (default): put them, so that they start at once. cancel: cancel them. dead: give them up. "
                "spread=10m: give them new due times, evenly over that time from now. What is cancelled or dead can be "
                "requeued. All but run change the record, and ask first, or need --yes"
            ),
        )
        parser.add_argument(
            "--no-expired",
            action="store_true",
            help="first expire the messages whose time to start is over (the reaper of a worker does the same)",
        )
        parser.add_argument("--dry-run", action="store_true", help="show what would be done, and write nothing")
        common.add_yes(parser)
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        overdue, spread = options["overdue"]
        how = {"overdue": overdue, "spread": spread, "no_expired": options["no_expired"], "dry_run": options["dry_run"]}
        with closing(common.required_broker(using)) as broker:
            self.ask_about_selectors(Message.objects.using(using).filter(state=State.SCHEDULED), options)
            self._run(using, Restore(using, broker, _selection(options), **how), options)

    def _run(self, using: str, job: Restore, options: dict[str, Any]) -> None:
        found = job.preview().total()
        if not options["json"]:
            self._say_preview(using, job.report, found)
        if job.overdue in CHANGES and found.overdue and not job.dry_run:
            what = f"{CHANGES[job.overdue]} {common.messages(found.overdue, 'overdue')}"
            self.confirm(f"This will {what}.", yes=options["yes"])
        observers = None if job.dry_run else RestoreObservers(_start(using, job, job.report.expected()))
        stop_requested = False

        def progress(done: int) -> None:
            nonlocal stop_requested
            if observers is not None:
                stop_requested = observers.progress(done, job.report.total(), job.report.position)

        error_text = "the command was ended"
        with common.Interruptible() as interruption:
            try:
                job.run(should_stop=lambda: interruption.asked() or stop_requested, progress=progress)
                error_text = ""
            except (BrokerUnavailable, OperationalError, InterfaceError) as error:
                error_text = f"{type(error).__name__}: {error}"
                self._say_summary(using, job, options)
                raise
            finally:
                job.release()
                if observers is not None:
                    observers.ended(job.report.total(), job.report.position, error_text)
        self._say_summary(using, job, options)
        if job.report.position is not None and not interruption.asked():
            raise CommandError("Stopped from outside between two batches.", returncode=1)
        if job.report.position is not None:
            raise CommandError("Interrupted between two batches.", returncode=interruption.returncode)

    def _say_preview(self, using: str, report: Report, found: Tally) -> None:
        self.say(
            f"Record: {common.messages(found.found, 'scheduled')}, {found.beyond:,} of them due beyond the horizon; "
            f"{found.running:,} running. Redis: {found.held:,} {'id' if found.held == 1 else 'ids'}."
        )
        for name, tally in report.queues.items():
            self.say(f"  {name}: {tally.found:,} scheduled, {tally.overdue:,} overdue; {tally.held:,} in Redis")
        if found.oldest is not None:
            age = (reads.now(using) - found.oldest).total_seconds()
            self.say(f"Overdue: {found.overdue:,}, the oldest since {iso(found.oldest)} ({brief(age)}).")

    def _say_summary(self, using: str, job: Restore, options: dict[str, Any]) -> None:
        report = job.report
        if options["json"]:
            self.say_json(
                database=using,
                dry_run=job.dry_run,
                complete=report.position is None,
                seconds=round(report.seconds, 3),
                total=_plain(report.total()),
                queues={name: _plain(tally) for name, tally in report.queues.items()},
            )
            return
        total = report.total()
        would = "Would put" if job.dry_run else "Put"
        parts = [
            f"{would} {common.messages(total.put)} into Redis",
            f"already there: {total.present:,}",
            f"due beyond the horizon: {total.beyond:,}",
        ]
        changed = {
            "cancelled": total.cancelled,
            "made dead": total.dead,
            "spread": total.spread,
            "expired": total.expired,
        }
        would_be = "would be " if job.dry_run else ""
        parts += [f"{would_be}{what}: {number:,}" for what, number in changed.items() if number]
        rate = (total.put + total.present) / max(0.001, report.seconds)
        self.say(f"{', '.join(parts)}; {report.seconds:.2f} s, {rate:,.0f} messages/s.")
        if report.position is not None:
            self.say("The restore is not complete. Begin it again: what is done already changes nothing.")


def _overdue(text: str) -> tuple[Overdue, float]:
    word, equals, time = text.partition("=")
    try:
        policy = Overdue(word)
    except ValueError:
        raise argparse.ArgumentTypeError("must be one of run, cancel, dead, spread=10m") from None
    if (policy == Overdue.SPREAD) != bool(equals):
        raise argparse.ArgumentTypeError("spread needs a time, such as spread=10m; the others take none")
    return policy, common.duration(time) if equals else 0.0


def _selection(options: dict[str, Any]) -> Selection:
    return Selection(
        queues=tuple(sorted(set(options["queue"]))),
        topics=tuple(sorted(set(options["topic"]))),
        ids=tuple(sorted(set(options["ids"]))),
        due_after=options["due_after"],
        due_before=options["due_before"],
    )


def _start(using: str, job: Restore, total: int) -> RestoreStart:
    """Describe this restore for its observers."""
    chosen = job.selection
    what = [*chosen.queues, *(f"topic {topic}" for topic in chosen.topics)]
    what += [f"{len(chosen.ids)} ids"] if chosen.ids else []
    what += [f"due from {iso(chosen.due_after)}"] if chosen.due_after else []
    what += [f"due before {iso(chosen.due_before)}"] if chosen.due_before else []
    return RestoreStart(
        using,
        f"command:{actors.host()}",
        chosen,
        job.overdue,
        job.spread.total_seconds(),
        no_expired=job.no_expired,
        described=", ".join(what) or "all queues",
        total=total,
    )


def _plain(tally: Tally) -> dict[str, Any]:
    facts = asdict(tally)
    facts["oldest_overdue"] = iso(facts.pop("oldest"))
    return facts
