"""``manage.py delayq_schedule``: schedule a message."""

from __future__ import annotations

import json
import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser

from ...api.scheduling import schedule_message
from ...core.clock import iso
from ...core.exceptions import InvalidMessage, KeyConflict
from ...core.names import near
from ...inspector import worker_list
from ...project.message_options import OnConflict
from ...record import reads
from .. import _common as common

# The options of the command that are those of the call.
_OPTIONS = (
    *("delay", "due_at", "queue", "priority", "key", "on_conflict", "unique", "expires", "max_attempts"),
    *("on_dead", "on_expired"),
)


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
        when.add_argument("--delay", type=common.span, metavar="TIME", help="due after this time, e.g. 15m")
        when.add_argument(
            "--due-at", type=common.due, metavar="TIME", help="due at this time (ISO 8601 with time zone)"
        )
        parser.add_argument("--queue", type=common.queue_name, help="the queue (default: the handler's)")
        parser.add_argument("--priority", type=int, help="from -100 to 100 (default: the handler's)")
        parser.add_argument("--key", type=common.key, help="the key")
        parser.add_argument(
            "--on-conflict", choices=[choice.value for choice in OnConflict], help="what to do when the key is taken"
        )
        parser.add_argument("--unique", help="how long it holds the key: live, scheduled, or a time such as 1h")
        parser.add_argument(
            "--expires", type=common.span, metavar="TIME", help="do not start it this long after its due time"
        )
        parser.add_argument("--max-attempts", type=int, metavar="NUMBER", help="give up after this number of attempts")
        for name, end in (("--on-dead", "dead"), ("--on-expired", "expired")):
            told = f"the topic of the message that follows if it ends {end} (default: the handler's)"
            parser.add_argument(name, type=common.topic_name, metavar="TOPIC", help=told)
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
        except InvalidMessage as error:
            raise common.wrong_usage(str(error)) from error
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
