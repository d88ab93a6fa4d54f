"""``manage.py delayq_verify``: the consistency check of the record against Redis."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ... import restore
from ...clock import iso
from ...inspector import consistency
from ...inspector.consistency import ConsistencyCheck, Mismatches
from .. import _common as common


class Command(common.DelayqCommand):
    help = (
        "Compare the record with Redis. The check finds messages that are missing in Redis, ids that are extra there, "
        "due times that are different, and running messages whose lease ran out long ago. A mismatch counts if it is "
        "still there after DELAYQ['GRACE'], because a message may be on its way. Workers repair all of this by "
        "themselves in time. --fix repairs it at once, except for running messages, which are left to workers."
    )
    exits = (0, 1, 2, 3, 69, 78)

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--queue", action="append", type=common.queue_name, default=[], help="only this queue (repeatable)"
        )
        parser.add_argument(
            "--fix", action="store_true", help="put ids that are missing or different, and remove extra ids"
        )
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        broker = common.required_broker(using)
        found: dict[str, Mismatches] = {}
        try:
            restore.writable_server(broker)
            for queue in options["queue"]:
                if not consistency.is_known(using, broker, queue):
                    raise CommandError(
                        f"There is no queue {queue}: neither the record nor Redis has a message to deliver in it, "
                        "and no setting or handler names it.",
                        returncode=common.USAGE,
                    )
            for queue in options["queue"] or restore.queues(using):
                found[queue] = ConsistencyCheck(using, broker, queue, fix=options["fix"]).run()
        finally:
            broker.close()
        stuck = consistency.stuck(using, options["queue"])
        if options["json"]:
            self.say_json(
                database=using,
                fixed=options["fix"],
                queues={name: _plain(one) for name, one in found.items()},
                stuck={"count": stuck.count, "lease_ran_out_at": iso(stuck.oldest)},
            )
        else:
            self._say(found, stuck)
        problems = sum(one.total - one.fixed for one in found.values()) + stuck.count
        if problems:
            raise CommandError(
                f"{problems:,} problem{'' if problems == 1 else 's'} found."
                f"{'' if options['fix'] else ' Run delayq_verify --fix to repair mismatches now.'}",
                returncode=common.PROBLEMS,
            )

    def _say(self, found: dict[str, Mismatches], stuck: consistency.Stuck) -> None:
        for name, one in found.items():
            counts = ", ".join(f"{number:,} {mismatch}" for mismatch, number in one.counts.items() if number)
            fixed = f"; {one.fixed:,} fixed" if one.fixed else ""
            self.say(f"{name}: {counts or 'no mismatch'}{fixed}")
            for mismatch, ids in one.examples.items():
                if ids:
                    self.say(f"  {mismatch}: {', '.join(map(str, ids))}{' …' * (one.counts[mismatch] > len(ids))}")
        if stuck.count:
            self.say(
                f"Stuck: {common.messages(stuck.count, 'running')} without a lease; the first one ran out at "
                f"{iso(stuck.oldest)}. Start a worker with the role reaper: it takes these messages back."
            )


def _plain(one: Mismatches) -> dict[str, Any]:
    return {
        "compared": one.compared,
        "fixed": one.fixed,
        **{str(mismatch): number for mismatch, number in one.counts.items()},
        "examples": {str(mismatch): ids for mismatch, ids in one.examples.items()},
    }
