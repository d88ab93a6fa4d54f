"""``manage.py delayq_token``: tokens of the HTTP door."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.management.base import CommandParser
from django.utils import translation

from ....core import values
from ....core.clock import iso
from ....management import _common as common
from ....project import conf
from ... import tokens
from ...exchange import LONGEST_NAME, NAME
from ...models import Token


class Command(common.DelayqCommand):
    help = (
        "Add a token for a namespace of the HTTP door, list the tokens, change the limit of one, or delete one. A "
        "token is shown once, when it is added; the list shows how it begins."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        actions = ["add", "list", "limit", "delete"]
        parser.add_argument("action", choices=actions, metavar="ACTION", help="add, list, limit or delete")
        parser.add_argument("namespace", nargs="?", type=_text, default="", metavar="NAMESPACE", help="the namespace")
        parser.add_argument(
            "--rights", default=",".join(tokens.RIGHTS), metavar="RIGHTS", help="add: of publish,consume,manage"
        )
        parser.add_argument("--lasts", type=common.span, metavar="TIME", help="add: how long the token lasts, e.g. 90d")
        parser.add_argument("--description", type=_description, default="", help="add: what the token is for")
        parser.add_argument(
            "--beginning", type=_text, default="", metavar="TEXT", help="limit, delete: the beginning of the token"
        )
        for name, calls in (("--reads", "take jobs"), ("--writes", "publish jobs")):
            text = f"add, limit: the most calls that {calls} in an interval; without it any number"
            parser.add_argument(name, type=_bounded, metavar="N", help=text)
        parser.add_argument("--interval", type=_bounded, default=1, metavar="SECONDS", help="add, limit: by default 1")

    def work(self, using: str, options: dict[str, Any]) -> None:
        common.require_routed(using)
        getattr(self, f"_{options['action']}")(options["namespace"], options)

    def _add(self, namespace: str, options: dict[str, Any]) -> None:
        rights = options["rights"].split(",")
        if not NAME.fullmatch(namespace) or not set(rights) <= set(tokens.RIGHTS):
            raise common.wrong_usage(
                "add takes a namespace of the characters A-Z a-z 0-9 - _, and --rights of publish, consume and manage."
            )
        lasts: timedelta | None = options["lasts"]
        token, text = tokens.make(namespace, rights, lasts=lasts, description=options["description"])
        if options["reads"] or options["writes"]:
            tokens.limit(token, options["reads"], options["writes"], options["interval"])
        self.say(text)

    def _list(self, namespace: str, options: dict[str, Any]) -> None:
        found = Token.objects.order_by("namespace", "id")
        where = "" if conf.get().REDIS else ", counted in each process by itself: there is no Redis"
        for token in found.filter(namespace=namespace) if namespace else found:
            until = "" if token.expires_at is None else f", until {iso(token.expires_at)}"
            with translation.override(None):
                limits = f", at most {token.limits}{where}" if token.limits else ""
            used = "never used" if token.used_at is None else f"last used {iso(token.used_at)}"
            self.say(f"{token}: {token.rights}{until}{limits}, {used} {token.description}".rstrip())

    def _limit(self, namespace: str, options: dict[str, Any]) -> None:
        tokens.limit(self._named(namespace, options), options["reads"], options["writes"], options["interval"])

    def _delete(self, namespace: str, options: dict[str, Any]) -> None:
        tokens.delete(self._named(namespace, options))

    @staticmethod
    def _named(namespace: str, options: dict[str, Any]) -> Token:
        found = list(Token.objects.filter(namespace=namespace, beginning__startswith=options["beginning"]))
        if len(found) != 1 or not options["beginning"]:
            raise common.wrong_usage(
                f"{options['action']} takes a namespace and the --beginning of one of its tokens, not {len(found)}."
            )
        return found[0]


def _text(text: str) -> str:
    """Read a text to look for."""
    return common.checked(values.text, text, LONGEST_NAME)


def _description(text: str) -> str:
    """Read what a token is for."""
    return common.checked(values.text, text, Token._meta.get_field("description").max_length)


def _bounded(text: str) -> int:
    """Read a number of a limit."""
    return common.checked(values.whole, common.count(text), 1, tokens.MOST_CALLS)
