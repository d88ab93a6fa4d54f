"""``manage.py delayq_pause``: pause queues."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from ... import pausing
from ...clock import iso
from ...exceptions import InvalidMessage
from .. import _common as common


class Command(common.DelayqCommand):
    help = (
        "Pause queues. When the command has ended, no worker starts a message of these queues any more. Running "
        "messages go on; messages that fall due wait. The pause ends with delayq_resume, or by itself with --for or "
        "--until. A queue that is paused already gets the new end and reason."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("queues", nargs="+", type=common.queue_name, metavar="QUEUE", help="the names of queues")
        end = parser.add_mutually_exclusive_group()
        end.add_argument(
            "--for",
            type=common.duration,
            dest="duration",
            metavar="TIME",
            help="end the pause after this time, e.g. 30m",
        )
        end.add_argument("--until", type=common.moment, help="end the pause at this time (ISO 8601 with time zone)")
        parser.add_argument("--reason", default="", help="shown with the queue, and recorded with the action")
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        facts = {name: options[name] for name in ("duration", "until", "reason")}
        paused = []
        for name in sorted(set(options["queues"])):
            try:
                queue = pausing.pause(using, name, **facts)
            except InvalidMessage as error:
                raise CommandError(str(error), returncode=common.USAGE) from error
            self.record_action(using, "pause", name, reason=options["reason"])
            paused.append(queue)
        if options["json"]:
            queues = {queue.name: iso(queue.resumes_at) for queue in paused}
            self.say_json(database=using, paused_until=queues)
            return
        for queue in paused:
            self.say(f"{queue.name}: paused until {iso(queue.resumes_at) or 'it is resumed'}")
