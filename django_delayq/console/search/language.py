"""The search for messages: one line of text, parsed once, the same in the admin, in exports and in operations.

In ``topic:mail.* due:<1h attempts:>3`` all terms must hold. The parser knows no request and never raises: terms that it
does not understand become ``problems``, and a search with problems matches no message.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import reduce
from operator import or_

from django.db.models import Q
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...core import bounds, names
from ...core.durations import brief, seconds
from ...core.outcomes import storable
from ...core.states import FINAL, LIVE, State
from ...core.values import row_id
from ...models import Message
from ..console_tuning import timeouts, tuning
from ..statements import in_time
from ..statements.portable_console import Scalar
from . import periods
from .conditions import ALL_STATES, NOTHING, SCHEDULED, JsonHas, OfOperation, limited, of_states, parts
from .mentions import Shown, holders
from .texts import exact_error_text, quoted, term_text

_TOKEN = re.compile(r'(?:[^\s"]|"(?:[^"\\]|\\.)*")+')
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
# A name before a colon that was probably meant as the name of a term: not the hour of a time of day.
_WORD = re.compile(r"[^\W\d][\w.-]*")
_NAME = re.compile(r'\.(?:"([^"\\]+)"|([^\s".\\]+))')
_CONSTANT = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_COMPARISON = re.compile(r"(<=|>=|<|>|=|)(\d{1,9})")
_LOOKUPS = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte", "": "exact", "=": "exact"}


class _Problem(ValueError):
    """A term cannot be read; the text says why, for the person who wrote it."""


@dataclass(frozen=True, slots=True)
class Value:
    """The text after the colon. A quoted value has no wildcards."""

    text: str
    quoted: bool = False

    @property
    def prefix(self) -> str | None:
        """The text that a match begins with, for values such as ``mail.*``; None for an exact value."""
        return self.text[:-1] if not self.quoted and self.text.endswith("*") and len(self.text) > 1 else None


@dataclass(frozen=True, slots=True)
class Term:
    """One condition. ``described`` says it in words; ``frozen`` is its text with absolute times."""

    condition: Q
    described: str
    frozen: str
    # The states that can match.
    states: frozenset[State] = ALL_STATES
    # True when the term names so few rows that all of them can be read.
    selective: bool = False
    # The column, or "limit", of which only one value can match, and this value.
    exactly: tuple[str, str] = ("", "")
    # The names of the path that it reads in payloads and headers.
    payload_names: tuple[str, ...] = ()
    # The column that the term limits to a range, for indexes that begin with it.
    range_column: str = ""
    # True when a partial index holds all rows that can match.
    has_partial_index: bool = False
    # True when all queues with matches are paused, False when none is.
    in_paused: bool | None = None
    # A value that was given without a name, so that it may be a key or a topic.
    key_or_topic: str | None = None
    # A number that was given without a name, so that it may be an id, or stand in keys and payloads.
    number: str = ""
    # The name before the colon, if no term has that name: then the whole text is a key, or a mistake.
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Search:
    """A parsed search: its terms, and the problems of the terms that could not be read."""

    text: str
    terms: tuple[Term, ...] = ()
    problems: tuple[str, ...] = ()
    # A note in words about what was searched only in part.
    notes: tuple[str, ...] = ()

    @property
    def states(self) -> frozenset[State]:
        """The states that can match."""
        return reduce(frozenset.__and__, (term.states for term in self.terms), ALL_STATES)

    @property
    def selective(self) -> bool:
        """True when an id, a key or an error narrows the search down to few rows."""
        return any(term.selective for term in self.terms)

    @property
    def has_partial_index(self) -> bool:
        """True when a partial index holds all rows that can match, though they may be many."""
        return any(term.has_partial_index for term in self.terms)

    def only(self, column: str) -> str | None:
        """Return the only value of a column of words that can match; None: any."""
        return next((value for name, value in (term.exactly for term in self.terms) if name == column), None)

    @property
    def payload_names(self) -> frozenset[str]:
        """The names that the search reads in payloads and headers."""
        return frozenset(name for term in self.terms for name in term.payload_names)

    @property
    def order(self) -> tuple[str, ...]:
        """The order: live messages soonest first, finished ones last finished first, a mixture newest first."""
        if self.states <= LIVE:
            return ("due_at", "id")
        return ("-finished_at", "-id") if self.states <= FINAL else ("-id",)

    @property
    def described(self) -> str:
        """The search in words."""
        return ", ".join(term.described for term in self.terms) or _("all messages")

    @property
    def frozen(self) -> str:
        """The text of the search with absolute times, so that it means the same at any moment and in any time zone."""
        return " ".join(term.frozen for term in self.terms)

    def __and__(self, other: Search) -> Search:
        text = f"{self.text} {other.text}".strip()
        return Search(text, self.terms + other.terms, self.problems + other.problems)

    def condition(self) -> Q:
        """Return the condition that messages must fulfil; a search with problems matches none."""
        if self.problems:
            return NOTHING
        return self.filters() & of_states(self.states)

    def filters(self) -> Q:
        """Return the condition without the states."""
        return reduce(Q.__and__, (term.condition for term in self.terms), Q())

    def resolved(self, using: str, shown: Shown) -> Search:
        """Return the search with each "key or topic" decided: it becomes a key or a topic, since no index answers an
        "or".

        Payloads are searched as ``shown`` shows them, with masks, for numbers and e-mail addresses.

        An unknown name before a colon becomes a problem, unless a key exists that begins with it.
        """
        terms: list[Term] = []
        problems, notes = list(self.problems), []
        for term in self.terms:
            try:
                found, note = _resolved(term, using, shown)
            except _Problem as problem:
                problems.append(str(problem))
            else:
                terms.append(found)
                notes.append(note)
        return replace(self, terms=tuple(terms), problems=tuple(problems), notes=tuple(filter(None, notes)))


def parse(text: str, *, now: datetime) -> Search:
    """Read a search. Times such as ``due:<1h`` and ``is:overdue`` count from ``now``."""
    text = text.strip()
    if len(text) > tuning.search_characters:
        return Search(text, (), (_("The search is too long."),))
    if storable(text, tuning.search_characters) != text:
        return Search(text, (), (_("The search has characters that no message can have."),))
    tokens, rest = _TOKEN.findall(text), _TOKEN.sub("", text)
    if '"' in rest:
        return Search(text, (), (_("A quotation mark is not closed."),))
    if len(tokens) > tuning.search_terms:
        return Search(text, (), (_("More than %(most)d terms.") % {"most": tuning.search_terms},))
    terms: list[Term] = []
    problems: list[str] = []
    for token in tokens:
        try:
            terms.append(_term(token, now))
        except _Problem as problem:
            problems.append(f"{token}: {problem}")
    return Search(text, tuple(terms), tuple(problems))


def _term(token: str, now: datetime) -> Term:
    """Read one term of a search."""
    name, colon, rest = _split(token)
    if colon and name.lower() in _QUALIFIERS:
        value = _value(rest)
        if not value.text and (name.lower() != "limit_key" or not value.quoted):
            raise _Problem(_("the value after the colon is missing."))
        return _QUALIFIERS[name.lower()](name.lower(), value, now)
    of = name.lower().partition(".")[0]
    if colon and of in _COLUMNS and of != name.lower():
        return _in_json(of, name, rest)
    value = _value(token)
    number = "" if value.quoted else value.text.removeprefix("#")
    if number.isascii() and number.isdigit():
        # Pages write #12345 for an id alone.
        return replace(_id("id", value, now), number=value.text if number == value.text else "")
    if not value.text:
        raise _Problem(_("the text between the quotation marks is missing."))
    if colon and not value.quoted and _WORD.fullmatch(name):
        return replace(_text("key", Value(value.text, quoted=True)), unknown=name)
    return _bare(value)


def _split(token: str) -> tuple[str, str, str]:
    """Split a token at the first colon outside of quotation marks: name, colon and value."""
    hidden = _QUOTED.sub(lambda match: "_" * len(match[0]), token)
    place = hidden.find(":")
    return (token[:place], ":", token[place + 1 :]) if place > 0 else (token, "", "")


def _value(text: str) -> Value:
    quoted = _QUOTED.fullmatch(text)
    if quoted is None:
        return Value(_QUOTED.sub(lambda match: _ESCAPED.sub(r"\1", match[1]), text))
    return Value(_ESCAPED.sub(r"\1", quoted[1]), quoted=True)


def _text(name: str, value: Value, now: datetime | None = None) -> Term:
    """Return the term of a column whose values are words."""
    label = {"key": _("key"), "topic": _("topic"), "queue": _("queue"), "limit_key": _("limit key")}[name]
    if value.prefix is not None:
        described = _("%(field)s begins with “%(text)s”") % {"field": label, "text": value.prefix}
        # The wildcard stays outside of the quotation marks.
        return Term(Q(**{f"{name}__startswith": value.prefix}), described, f"{term_text(name, value.prefix)}*")
    described = _("%(field)s is “%(text)s”") % {"field": label, "text": value.text}
    # A message without a limit key has NULL there, and never an empty text.
    condition, frozen = Q(**{name: value.text or None}), term_text(name, value.text)
    return Term(condition, described, frozen, selective=name == "key", exactly=(name, value.text))


def _id(name: str, value: Value, now: datetime) -> Term:
    # Pages write an id as #12345.
    try:
        given = [row_id(part.removeprefix("#")) for part in value.text.split(",")]
    except ValueError:
        raise _Problem(_("not an id. Write id:12345 or id:1,2,3.")) from None
    if len(given) > tuning.term_ids:
        raise _Problem(_("more than %(most)d ids.") % {"most": tuning.term_ids})
    ids = sorted(set(given))
    written = ",".join(map(str, ids))
    condition = Q(pk=ids[0]) if len(ids) == 1 else Q(pk__in=ids)
    return Term(condition, _("id %(ids)s") % {"ids": written.replace(",", ", ")}, f"id:{written}", selective=True)


def _operation(name: str, value: Value, now: datetime) -> Term:
    try:
        number = row_id(value.text.removeprefix("#"))
    except ValueError:
        raise _Problem(_("not an operation. Write operation:5.")) from None
    described = _("of operation #%(id)d") % {"id": number}
    return Term(Q(OfOperation(number)), described, f"operation:{number}", selective=True)


def _limit(name: str, value: Value, now: datetime) -> Term:
    whole = value.prefix is None
    text = value.text if value.prefix is None else value.prefix
    described = _("waiting for a limit whose name begins with “%(text)s”")
    if whole:
        described = _("waiting for the limit “%(text)s”")
    frozen = f"{term_text('limit', text)}{'' if whole else '*'} {_due_before(now)}"
    exactly = ("limit", text) if whole else ("", "")
    return Term(limited(now, text, whole=whole), described % {"text": text}, frozen, SCHEDULED, exactly=exactly)


def _due_before(end: datetime) -> str:
    """Return the term that restricts limited or overdue messages to those that were so at a moment."""
    return f"due:{periods.Period(end=end).frozen()}"


def _worker(name: str, value: Value, now: datetime) -> Term:
    prefix = value.text if value.prefix is None else value.prefix
    described = _("running on a worker whose name begins with “%(text)s”") % {"text": prefix}
    return Term(Q(worker__startswith=prefix), described, term_text("worker", prefix), frozenset({State.RUNNING}))


def _state(name: str, value: Value, now: datetime) -> Term:
    given = value.text.lower().split(",")
    if not set(given) <= set(State.values):
        text = _("not a state. Write one of %(states)s.") % {"states": ", ".join(State.values)}
        raise _Problem(text + _meant(name, given, State.values))
    states = [state for state in State if state.value in given]
    described = _(" or ").join(str(state.label) for state in states)
    return Term(Q(), described, "state:" + ",".join(state.value for state in states), frozenset(states))


def _meant(name: str, given: list[str], known: Iterable[str]) -> str:
    """Return a question for the term whose values are like those that were given; empty when one is like none."""
    near = [value if value in known else names.near(value, known) for value in given]
    return _(" Did you mean %(near)s?") % {"near": f"{name}:{','.join(map(str, near))}"} if all(near) else ""


# The words after "is:", as descriptions have them.
_IS = {
    "live": gettext_lazy("live"),
    "finished": gettext_lazy("finished"),
    "overdue": gettext_lazy("overdue"),
    "paused": gettext_lazy("paused"),
    "limited": gettext_lazy("limited"),
    "retrying": gettext_lazy("retrying"),
}


def _is(name: str, value: Value, now: datetime) -> Term:
    word = value.text.lower()
    if word not in _IS:
        text = _("unknown. Write %(known)s.") % {"known": ", ".join(f"is:{each}" for each in _IS)}
        raise _Problem(text + _meant(name, [word], _IS))
    frozen, described = f"is:{word}", str(_IS[word])
    if (states := {"live": LIVE, "finished": FINAL}.get(word)) is not None:
        return Term(Q(), described, frozen, states)
    if word != "retrying":
        frozen += f" {_due_before(now - bounds.OVERDUE_AFTER if word == 'overdue' else now)}"
    in_paused = {"overdue": False, "paused": True}.get(word)
    return Term(parts(now)[word], described, frozen, SCHEDULED, in_paused=in_paused)


_TIMES = {"due": "due_at", "created": "created_at", "finished": "finished_at"}


def _time(name: str, value: Value, now: datetime) -> Term:
    past = name != "due"
    period = periods.parse(value.text, now, past=past)
    if period is None:
        text = _("not a time. Write %(name)s:<1h, %(name)s:today or %(name)s:2026-01-02..2026-01-03.")
        raise _Problem(text % {"name": name})
    field = _TIMES[name]
    bounds_of_it = {f"{field}__gte": period.start, f"{field}__lt": period.end}
    condition = Q(**{lookup: at for lookup, at in bounds_of_it.items() if at is not None})
    label = {"due": _("due"), "created": _("created"), "finished": _("finished")}[name]
    states = FINAL if name == "finished" else ALL_STATES
    return Term(condition, f"{label} {period.described()}", f"{name}:{period.frozen()}", states, range_column=field)


def _late(name: str, value: Value, now: datetime) -> Term:
    text = value.text.removeprefix(">")
    try:
        length = timedelta(seconds=seconds(text))
        end = now - length
    except (ValueError, OverflowError):
        raise _Problem(_("not a length of time. Write late:5m.")) from None
    described = _("waiting, more than %(span)s after its due time") % {"span": brief(length.total_seconds())}
    frozen = f"state:{State.SCHEDULED} {_due_before(end)}"
    return Term(Q(due_at__lt=end), described, frozen, SCHEDULED, range_column="due_at")


def _attempts(name: str, value: Value, now: datetime) -> Term:
    comparison = _COMPARISON.fullmatch(value.text)
    if comparison is None:
        raise _Problem(_("not a number. Write attempts:3 or attempts:>3."))
    mark, number = comparison[1], int(comparison[2])
    described = _("failed attempts %(comparison)s") % {"comparison": f"{mark or '='} {number}"}
    return Term(Q(**{f"attempts__{_LOOKUPS[mark]}": number}), described, f"attempts:{mark}{number}")


def _error(name: str, value: Value, now: datetime) -> Term:
    if not value.quoted and value.text.startswith("="):
        kind = value.text[1:]
        condition = Q(error=kind) & ~Q(error="") if kind else Q(error="")
        return Term(condition, _("error is “%(text)s”") % {"text": kind}, exact_error_text(kind))
    # The empty error is excluded in the words of the partial index on failed messages, so that it can be used.
    condition = ~Q(error="") & Q(error__icontains=value.text)
    described = _("error contains “%(text)s”") % {"text": value.text}
    return Term(condition, described, term_text("error", value.text), selective=True, has_partial_index=True)


# The word before the path of a value, and the column in which the value is.
_COLUMNS = {"payload": "payload", "header": "headers"}


def _in_json(of: str, name: str, rest: str) -> Term:
    """Return the term of a value in the payload or in the headers."""
    path = tuple(quoted or plain for quoted, plain in _NAME.findall(name[len(of) :]))
    if "".join(match[0] for match in _NAME.finditer(name)) != name[len(of) :]:
        raise _Problem(_("not a path. Write payload.order.id:42 or header.tenant:acme."))
    if len(path) > tuning.path_names:
        raise _Problem(_("more than %(most)d names in the path.") % {"most": tuning.path_names})
    value = _value(rest)
    if not value.text and not value.quoted:
        raise _Problem(_("the value after the colon is missing."))
    condition = reduce(or_, (Q(JsonHas(_COLUMNS[of], path, each)) for each in _scalars(value)))
    # The description is written to the audit and shown on pages, where values of payloads must not appear.
    text = _("payload %(path)s is a given value") if of == "payload" else _("header %(path)s is a given value")
    described = text % {"path": ".".join(path)}
    return Term(condition, described, f"{name}:{rest}", payload_names=path)


def _scalars(value: Value) -> list[Scalar]:
    """Return the value as text, and also as the number or the constant that it may be."""
    if not value.quoted and _CONSTANT.fullmatch(value.text) and len(value.text) <= 40:
        found: float | None = json.loads(value.text)
        if abs(found or 0) < 2**63:
            return [found, value.text]
    return [value.text]


def _bare(value: Value) -> Term:
    if value.prefix is not None:
        return _text("topic", value)
    condition = Q(key=value.text) | Q(topic=value.text)
    described = _("key or topic is “%(text)s”") % {"text": value.text}
    return Term(condition, described, quoted(value.text), key_or_topic=value.text)


def _resolved(term: Term, using: str, shown: Shown) -> tuple[Term, str]:
    """Return the term with its meaning decided, and a note on the part of the record that was not searched for it."""
    key, note = term.exactly[1] if term.unknown else term.key_or_topic, ""
    if text := term.number or (key if key and "@" in key and not term.unknown else ""):
        ids, note = holders(using, text, shown)
        if ids:
            ids |= {int(text)} if term.number else set()
            # No value of a payload may appear in the audit.
            described = _("the address is in the key or the payload")
            if term.number:
                described = _("the number is the id, or is in the key or the payload")
            return Term(Q(pk__in=ids), described, f"id:{','.join(map(str, sorted(ids)))}", selective=True), note
    if key is None:
        return term, note
    is_key = in_time(using, timeouts.page, Message.objects.using(using).filter(key=key).exists)
    if is_key is None:
        # The database has not answered in time: the value may be a key or a topic.
        return term, note
    if term.unknown:
        if is_key:
            return replace(term, unknown=""), note
        raise _Problem(_unknown(term))
    return replace(_text("key" if is_key else "topic", Value(key, quoted=True)), key_or_topic=key), note


def _unknown(term: Term) -> str:
    """Say that a qualifier is unknown, and which one may be meant."""
    near = difflib.get_close_matches(term.unknown.lower(), _QUALIFIERS, n=1)
    if near:
        text = _("%(name)s: is unknown. Did you mean %(near)s:? A key with a colon is written %(key)s.")
        return text % {"name": term.unknown, "near": near[0], "key": term.frozen}
    text = _("%(name)s: is unknown. Write one of %(known)s:. A key with a colon is written %(key)s.")
    return text % {
        "name": term.unknown,
        "known": ":, ".join([*_QUALIFIERS, *(f"{of}.NAME" for of in _COLUMNS)]),
        "key": term.frozen,
    }


_QUALIFIERS: dict[str, Callable[[str, Value, datetime], Term]] = {
    "id": _id,
    "key": _text,
    "topic": _text,
    "queue": _text,
    "state": _state,
    "is": _is,
    "due": _time,
    "late": _late,
    "created": _time,
    "finished": _time,
    "attempts": _attempts,
    "error": _error,
    "worker": _worker,
    "limit": _limit,
    "limit_key": _text,
    "operation": _operation,
}
