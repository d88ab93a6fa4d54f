"""``manage.py delayq_verify``: compare the record with Redis."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_delayq import restore
from django_delayq.inspector import consistency
from django_delayq.inspector.consistency import ConsistencyCheck, Mismatches
from django_delayq.management import _common as common


class Command(common.DelayqCommand):
    help = (
        "Compare the record with Redis: messages that are missing there, ids that are extra, due times that are "
        "different, and running messages whose lease ran out long ago. What differs is looked at a second time after "
        "DELAYQ['GRACE'], since a message may have been on its way. Workers mend all of it by themselves in time; "
        "--fix does at once (except for the running ones, which are a worker's)."
    )
    exits = (0, 1, 2, 3, 69, 78)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--queue", action="append", type=common.queue_name, default=[], help="only this queue (repeatable)"
        )
        parser.add_argument("--fix", action="store_true", help="put what is missing or different, remove what is extra")
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        broker = common.required_broker(using)
        bar = common.Bar(self.stderr, 0, options["verbosity"])
        found: dict[str, Mismatches] = {}
        try:
            restore.writable_server(broker)
            for queue in options["queue"] or restore.queues(using):
                found[queue] = ConsistencyCheck(using, broker, queue, fix=options["fix"]).run(bar)
        finally:
            bar.close()
            broker.close()
        stuck = consistency.stuck(using, options["queue"])
        if options["json"]:
            self.say_json(
                database=using,
                fixed=options["fix"],
                queues={name: _plain(one) for name, one in found.items()},
                stuck={"count": stuck.count, "lease_ran_out_at": common.iso(stuck.oldest)},
            )
        else:
            self._say(found, stuck)
        differing = sum(one.total - one.fixed for one in found.values())
        if differing or stuck.count:
            raise CommandError(f"{differing + stuck.count} differ.", returncode=common.PROBLEMS)

    def _say(self, found: dict[str, Mismatches], stuck: consistency.Stuck) -> None:
        for name, one in found.items():
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in one.counts.items() if number)
            fixed = f"; {one.fixed:,} fixed" if one.fixed else ""
            self.say(f"{name}: {kinds or 'the same'}{fixed}")
            for kind, ids in one.examples.items():
                if ids:
                    self.say(f"  {kind}: {', '.join(map(str, ids))}{' …' * (one.counts[kind] > len(ids))}")
        if stuck.count:
            self.say(
                f"Stuck: {stuck.count:,} running though their lease ran out, the first at {common.iso(stuck.oldest)}: "
                "is a worker with the role of the reaper alive?"
            )


def _plain(one: Mismatches) -> dict[str, Any]:
    return {
        "compared": one.compared,
        "fixed": one.fixed,
        **{str(kind): number for kind, number in one.counts.items()},
        "examples": {str(kind): ids for kind, ids in one.examples.items()},
    }
