"""``manage.py delayq_schedule``: schedule a message."""

from __future__ import annotations

import json
import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...api.scheduling import schedule_message
from ...core.clock import iso
from ...core.exceptions import KeyConflict
from ...core.names import near
from ...inspector import worker_list
from ...project.message_options import OnConflict
from ...record import reads
from .. import _common as common

# The options of the command that are those of the call.
DUE: common.Values = {
    "--delay": (common.span, "due after this time, e.g. 15m"),
    "--due-at": (common.due, "due at this time (ISO 8601 with time zone)"),
}
OTHERS: common.Values = {
    "--queue": (common.queue_name, "the queue (default: the handler's)"),
    "--priority": (int, "from -100 to 100 (default: the handler's)"),
    "--key": (common.key, "the key"),
    "--unique": (str, "how long it holds the key: live, scheduled, or a time such as 1h"),
    "--expires": (common.span, "do not start it this long after its due time"),
    "--max-attempts": (int, "give up after this number of attempts"),
    "--on-dead": (common.topic_name, "the topic of what follows if it ends dead (default: the handler's)"),
    "--on-expired": (common.topic_name, "the topic of what follows if it ends expired (default: the handler's)"),
}
_OPTIONS = ["on_conflict", *(flag[2:].replace("-", "_") for flag in (*DUE, *OTHERS))]


class Command(common.DelayqCommand):
    help = (
        "Schedule a message as schedule_message() does, and print its id. A topic that nothing knows can be scheduled; "
        "if it is like a known one, the command asks first, or needs --yes."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("topic", type=common.topic_name, metavar="TOPIC", help="the topic")
        parser.add_argument(
            "payload", nargs="?", default="null", metavar="JSON", help="the payload; - reads it from stdin"
        )
        when = parser.add_mutually_exclusive_group()
        common.add_values(when.add_argument, DUE)
        parser.add_argument(
            "--on-conflict", choices=[choice.value for choice in OnConflict], help="what to do when the key is taken"
        )
        common.add_values(parser.add_argument, OTHERS)
        common.add_yes(parser)
        common.add_json(parser)

    def work(self, using: str, options: dict[str, Any]) -> None:
        topic = options["topic"]
        known = worker_list.known_topics(worker_list.list_workers(using, reads.now(using)))
        if topic not in known:
            self.ask_about({f"Nothing knows the topic {topic}": near(topic, known)}, yes=options["yes"])
        given = {name: options[name] for name in _OPTIONS if options[name] is not None}
        try:
            message = schedule_message(topic, _payload(options["payload"]), using=using, **given)
        except KeyConflict as error:
            raise CommandError(str(error)) from error
        if options["json"]:
            facts = {"id": message.pk, "due_at": iso(message.due_at), "existed": message.existed}
            self.say_json(database=using, **facts)
        else:
            self.say(str(message.pk))


def _payload(text: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if text == "-" else text)
    except ValueError as error:
        raise common.wrong_usage(f"The payload is not JSON: {error}") from error
