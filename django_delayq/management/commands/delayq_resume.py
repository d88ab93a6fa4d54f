"""``manage.py delayq_resume``: resume paused queues."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ... import pausing
from .. import _common as common


class Command(common.DelayqCommand):
    help = "Resume paused queues. Workers start messages of these queues again within about a second."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("queues", nargs="+", type=common.queue_name, metavar="QUEUE", help="the names of queues")
        parser.add_argument("--reason", default="", help="recorded with the action")
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        resumed = {}
        for name in sorted(set(options["queues"])):
            resumed[name] = pausing.resume(using, name)
            if resumed[name]:
                self.record_action(using, "resume", name, reason=options["reason"])
        if options["json"]:
            self.say_json(database=using, resumed=resumed)
            return
        for name, was_paused in resumed.items():
            self.say(f"{name}: {'resumed' if was_paused else 'was not paused'}")
