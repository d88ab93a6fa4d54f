"""``manage.py delayq_token``: tokens of the HTTP door."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.management.base import CommandParser

from ....core.clock import iso
from ....management import _common as common
from ... import tokens
from ...models import Token


class Command(common.DelayqCommand):
    help = (
        "Add a token for a namespace of the HTTP door, list the tokens, or delete one. A token is shown once, when it "
        "is added; the list shows how it begins."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("action", choices=["add", "list", "delete"], metavar="ACTION", help="add, list or delete")
        parser.add_argument("namespace", nargs="?", default="", metavar="NAMESPACE", help="the namespace")
        parser.add_argument(
            "--rights", default=",".join(tokens.RIGHTS), metavar="RIGHTS", help="add: of publish,consume,manage"
        )
        parser.add_argument("--lasts", type=common.span, metavar="TIME", help="add: how long it is good, e.g. 90d")
        parser.add_argument("--description", default="", help="add: what it is for")
        parser.add_argument("--beginning", default="", metavar="TEXT", help="delete: how the token begins")

    def work(self, using: str, options: dict[str, Any]) -> None:
        getattr(self, f"_{options['action']}")(options["namespace"], options)

    def _add(self, namespace: str, options: dict[str, Any]) -> None:
        rights = options["rights"].split(",")
        if not namespace or not set(rights) <= set(tokens.RIGHTS):
            raise common.wrong_usage("add takes a namespace, and --rights of publish, consume and manage.")
        lasts: timedelta | None = options["lasts"]
        _token, text = tokens.make(namespace, rights, lasts=lasts, description=options["description"])
        self.say(text)

    def _list(self, namespace: str, options: dict[str, Any]) -> None:
        found = Token.objects.order_by("namespace", "id")
        for token in found.filter(namespace=namespace) if namespace else found:
            until = "" if token.expires_at is None else f", until {iso(token.expires_at)}"
            self.say(f"{token}: {token.rights}{until} {token.description}".rstrip())

    def _delete(self, namespace: str, options: dict[str, Any]) -> None:
        found = list(Token.objects.filter(namespace=namespace, beginning__startswith=options["beginning"]))
        if len(found) != 1 or not options["beginning"]:
            raise common.wrong_usage(
                f"delete takes a namespace and the --beginning of one of its tokens, not {len(found)}."
            )
        tokens.delete(found[0])
