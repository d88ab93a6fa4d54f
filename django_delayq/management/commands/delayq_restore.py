"""``manage.py delayq_restore``: fill Redis again from the record."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import InterfaceError, OperationalError

from ... import actors, restore, transitions
from ...clock import iso
from ...durations import brief
from ...exceptions import BrokerUnavailable
from ...extensions import RestoreObservers, RestoreStart
from ...restore import Overdue, Report, Restore, Selection, Tally
from .. import _common as common


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
        common.add_selectors(parser)
        parser.add_argument(
            "--id", action="append", type=common.message_id, default=[], help="only this message (repeatable)"
        )
        parser.add_argument(
            "--overdue",
            type=_overdue,
            default=(Overdue.RUN, 0.0),
            metavar="{run,skip,dead,spread=TIME}",
            help=(
                "what to do with overdue messages, which should have started more than DELAYQ['OVERDUE_AFTER'] ago. "
                "run (default): put them, so that they start at once. skip: do not put them; they stay scheduled, "
                "and a running worker will still find and start them, so this saves Redis a burst but stops nothing. "
                "dead: make them dead in the record (they can be requeued). spread=10m: give them new due times in the "
                "record, evenly over that time from now. dead and spread ask first, or need --yes"
            ),
        )
        parser.add_argument(
            "--no-expired",
            action="store_true",
            help="first expire the messages whose time to start is over (the reaper of a worker does the same)",
        )
        parser.add_argument("--dry-run", action="store_true", help="show what would be done, and write nothing")
        parser.add_argument(
            "--batch-size", type=common.positive, default=1000, help="messages per query (default 1000)"
        )
        parser.add_argument(
            "--resume", metavar="POSITION", help="go on at the position that an interrupted restore printed"
        )
        common.add_yes(parser)
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        broker = common.required_broker(using)
        overdue, spread = options["overdue"]
        try:
            job = Restore(
                using,
                broker,
                _selection(options),
                overdue=overdue,
                spread=spread,
                no_expired=options["no_expired"],
                dry_run=options["dry_run"],
                batch_size=options["batch_size"],
                resume=options["resume"],
            )
        except restore.InvalidPosition as error:
            raise CommandError(f"--resume: {error}.", returncode=common.USAGE) from error
        try:
            self._run(using, job, options)
        finally:
            broker.close()

    def _run(self, using: str, job: Restore, options: dict[str, Any]) -> None:
        found = job.preview().total()
        if not options["json"]:
            self._say_preview(using, job.report, found)
        if job.overdue in (Overdue.DEAD, Overdue.SPREAD) and found.overdue and not job.dry_run:
            what = "make dead" if job.overdue == Overdue.DEAD else "give new due times to"
            self.confirm(f"This will {what} {common.messages(found.overdue, 'overdue')}.", yes=options["yes"])
        total = job.report.expected(job.overdue)
        bar = common.ProgressBar(self.stderr, total, options["verbosity"])
        observers = None if job.dry_run else RestoreObservers(_start(using, job, total))
        stop_requested = False

        def progress(done: int) -> None:
            nonlocal stop_requested
            bar(done)
            if observers is not None:
                stop_requested = observers.progress(done, job.report.total(), job.report.position)

        error_text = "the command was ended"
        with common.Interruptible() as interruption:
            try:
                job.run(should_stop=lambda: interruption.asked() or stop_requested, progress=progress)
                error_text = ""
            except (BrokerUnavailable, OperationalError, InterfaceError) as error:
                error_text = f"{type(error).__name__}: {error}"
                bar.close()
                self._say_summary(using, job, options)
                raise
            finally:
                job.release()
                if observers is not None:
                    observers.ended(job.report.total(), job.report.position, error_text)
        bar.close()
        self._say_summary(using, job, options)
        if job.report.position is not None and not interruption.asked():
            raise CommandError("Stopped in the console between two batches.", returncode=1)
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
            age = (transitions.now(using) - found.oldest).total_seconds()
            self.say(f"Overdue: {found.overdue:,}, the oldest since {iso(found.oldest)} ({brief(age)}).")

    def _say_summary(self, using: str, job: Restore, options: dict[str, Any]) -> None:
        report = job.report
        if options["json"]:
            self.say_json(
                database=using,
                dry_run=job.dry_run,
                complete=report.position is None,
                position=report.position,
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
        changed = (("made dead", total.dead), ("spread", total.spread), ("expired", total.expired))
        parts += [f"{'would be ' * job.dry_run}{what}: {number:,}" for what, number in changed if number]
        if total.skipped:
            parts.append(f"overdue and skipped: {total.skipped:,}")
        rate = (total.put + total.present) / max(0.001, report.seconds)
        self.say(f"{', '.join(parts)}; {report.seconds:.2f} s, {rate:,.0f} messages/s.")
        if report.position is not None:
            self.say(f"The restore is not complete. Repeat it with the same options and --resume {report.position}")


def _overdue(text: str) -> tuple[Overdue, float]:
    word, equals, time = text.partition("=")
    try:
        policy = Overdue(word)
    except ValueError:
        raise argparse.ArgumentTypeError("must be one of run, skip, dead, spread=10m") from None
    if (policy == Overdue.SPREAD) != bool(equals):
        raise argparse.ArgumentTypeError("spread needs a time, such as spread=10m; the others take none")
    return policy, common.duration(time) if equals else 0.0


def _selection(options: dict[str, Any]) -> Selection:
    return Selection(
        queues=tuple(sorted(set(options["queue"]))),
        topics=tuple(sorted(set(options["topic"]))),
        ids=tuple(sorted(set(options["id"]))),
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
