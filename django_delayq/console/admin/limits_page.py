"""The list of limits: how much of each is used up, and who waits for it; and the page that overrides one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ...api import limiting
from ...core import limits
from ...core.bounds import LENGTHS
from ...core.exceptions import InvalidMessage
from ...core.limits import Limit, parts
from ...core.names import near
from ...core.outcomes import storable
from ...core.states import State
from ...inspector import stats, worker_list
from ...inspector.numbers import Capped, total
from ...inspector.stats import LimitState
from ...models import Message, Queue
from ...record import reads
from ..console_tuning import timeouts
from ..models import Limits, Topics
from ..search import texts as searches
from ..statements import in_time, statement_timeout
from . import charts, page, page_data, panels
from .explanation import limit_text, limit_words, override_facts, span, terms_text
from .forms import PauseForm, ReasonField
from .page import Page
from .page_data import PageData
from .readonly import ReadOnly

# A topic shows this many of its keys.
_KEYS = 10
_KINDS = {"topic": gettext_lazy("topic"), "queue": gettext_lazy("queue")}


class OverrideForm(PauseForm):
    """The limit that the user means, the override of it, and its end."""

    topic = forms.CharField(
        label=gettext_lazy("Topic"), required=False, widget=forms.TextInput(attrs={"list": "dq-topic"})
    )
    limit_key = forms.CharField(
        label=gettext_lazy("Limit key"),
        required=False,
        help_text=gettext_lazy("Empty: each key of the topic by itself."),
    )
    queue = forms.CharField(
        label=gettext_lazy("Or queue"), required=False, widget=forms.TextInput(attrs={"list": "dq-queue"})
    )
    limit = forms.IntegerField(
        label=gettext_lazy("At once"),
        required=False,
        min_value=0,
        max_value=limits.MOST,
        help_text=gettext_lazy("0 pauses: nothing begins. Empty: as the code declares it."),
    )
    rate = forms.CharField(
        label=gettext_lazy("Rate"),
        required=False,
        max_length=LENGTHS.rate,
        help_text=gettext_lazy("For example 100/m or 5/10s."),
    )
    burst = forms.IntegerField(label=gettext_lazy("Burst"), required=False, min_value=1, max_value=limits.MOST)
    reason = ReasonField(gettext_lazy("Written to the audit."))
    field_order = ("topic", "limit_key", "queue", "limit", "rate", "burst", "duration", "until", "reason")

    def __init__(self, data: Any, *, name: str, pauses: bool, initial: dict[str, Any]) -> None:
        """Make the form for the limit of this name; without one the form asks which limit is meant.

        One that ``pauses`` asks only for the end and the reason.
        """
        super().__init__(data, initial=initial)
        self.limit_name = name
        for field in ("topic", "limit_key", "queue") if name else ():
            del self.fields[field]
        for field in ("limit", "rate", "burst") if pauses else ():
            self.fields[field].widget = forms.HiddenInput()

    def clean_rate(self) -> str | None:
        rate: str = self.cleaned_data["rate"].strip()
        try:
            limits.override(None, None, rate, None)
        except ValueError:
            raise forms.ValidationError(_("This is not a rate. Write for example 100/m, 2/s or 5/10s.")) from None
        return rate or None

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        if self.errors:
            return cleaned
        if all(cleaned[name] is None for name in ("limit", "rate", "burst")):
            raise forms.ValidationError(_("Give a number at once, a rate or a burst."))
        meant = {name: cleaned.pop(name, None) or None for name in ("topic", "limit_key", "queue")}
        try:
            cleaned["name"] = self.limit_name or limiting.name_of(**meant)
        except InvalidMessage:
            raise forms.ValidationError(_("Give a topic, with a limit key or without, or a queue.")) from None
        return cleaned


class LimitsAdmin(Page):
    """The limits, for users who may view messages."""

    template = "limits"

    def content(self, request: HttpRequest) -> dict[str, Any]:
        data = PageData()
        change = change_urls(self, request)
        # The overrides are read anew for each page, because a user who has just overridden a limit wants to see it.
        panels.load("overrides", data.using, limiting.in_force, data.using, kept=0.0)
        found = data.limits
        known = found.value.longest if found.value else ()
        listed = families(self, known, data.at, change["override_url"])
        return {
            "lines": found,
            "limits": listed[: self.list_per_page],
            "waiting": _waiting(known, data.at),
            "legend": charts.legend([("0", _("in use")), ("1", _("full")), ("none", _("free"))]),
            "partial": len(listed) > self.list_per_page or len(known) >= page_data.MOST_LIMITS,
            "most": min(len(listed), self.list_per_page),
            **change,
        }

    def override_view(self, request: HttpRequest) -> HttpResponse:
        """Ask for the override of a limit on GET; override it on POST."""
        self.require(request, "override")
        name, initial = _meant(request.GET.get("name", ""))
        with statement_timeout(self.using, timeouts.page):
            row = limiting.in_force(self.using).get(name)
            states = stats.read_limits(self.using, [name]) if name else []
        known = {} if name else in_time(self.using, timeouts.beside, _known, self.using) or {}
        if row is not None:
            # What is left empty is as the code declares it, and no more as the present override says.
            initial |= {"limit": row.limit, "rate": row.rate, "burst": row.burst, "until": row.until}
        pauses = request.GET.get("limit") == "0"
        if pauses:
            initial["limit"] = 0
        form = OverrideForm(
            request.POST if request.method == "POST" else None, name=name, pauses=pauses, initial=initial
        )
        if form.is_valid():
            given, name = form.cleaned_data, form.cleaned_data.pop("name")
            try:
                with page.acting_as_user(request):
                    limiting.override(self.using, name, **given)
                    page.record(request, "override", name, reason=given["reason"])
            except InvalidMessage:
                form.add_error(None, _("The override would have ended already."))
            else:
                kind, what, _key = parts(name)
                if like := near(what, known.get(kind, ())):
                    text = _("No handler and no live worker is known for %(limit)s. Did you mean %(like)s?")
                    messages.warning(request, text % {"limit": limit_words(name), "like": like})
                return self._done(request, _("The limit %(limit)s holds in all workers."), name)
        shown = {"limits": rows(self, states, timezone.now()), "action": "pause" if pauses else "override"}
        facts = {"form": form, "known": known, "url": request.get_full_path(), "back": self.url(Limits), **shown}
        title = _("Pause %(limit)s") if pauses else _("Override the limit of %(limit)s")
        title = title % {"limit": limit_words(name)} if name else _("Override a limit")
        return page.response(self, request, title, "limit_override", facts)

    def reset_view(self, request: HttpRequest) -> HttpResponse:
        """Reset a limit to the declaration in the code."""
        self.require(request, "reset")
        if request.method != "POST":
            return HttpResponseRedirect(self.url(Limits))
        name = storable(request.POST.get("name", ""))
        with page.acting_as_user(request):
            if was_overridden := limiting.reset(self.using, name):
                page.record(request, "reset", name)
        done = _("The limit %(limit)s is as the code declares it.")
        return self._done(request, done if was_overridden else _("The limit %(limit)s was not overridden."), name)

    def _done(self, request: HttpRequest, text: str, name: str) -> HttpResponse:
        panels.forget()
        return self.leave(request, self.url(Limits), text % {"limit": name}, messages.SUCCESS)


def _known(using: str) -> dict[str, list[str]]:
    """Return the topics and queues that the form suggests."""
    topics = worker_list.known_topics(worker_list.list_workers(using, reads.now(using)))
    return {"topic": sorted(topics), "queue": sorted(worker_list.known_queues(using))}


def _meant(given: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a limit that an address gives, and what it counts; nothing for a name that no limit has."""
    with suppress(ValueError, InvalidMessage):
        kind, what, key = parts(given)
        if kind in _KINDS:
            meant = {kind: what, "limit_key": key}
            return limiting.name_of(**meant), meant
    return "", {}


def change_urls(shown: Page, request: HttpRequest) -> dict[str, str]:
    """Return the addresses at which limits are overridden and reset; none for users who may not."""
    may_override = shown.may(request, "override")
    return {f"{verb}_url": shown.url(Limits, verb) if may_override else "" for verb in ("override", "reset")}


def of_limit(override_url: str, name: str) -> str:
    """Return the address at which a limit is overridden."""
    return override_url and f"{override_url}?{urlencode({'name': name})}"


def rows(shown: ReadOnly, states: Iterable[LimitState], now: datetime, override_url: str = "") -> list[SimpleNamespace]:
    """Return limits as pages show them, with the addresses of the lists of messages that run and that wait."""
    return [_row(shown, limit, now, override_url) for limit in states]


def families(
    shown: ReadOnly, states: Collection[LimitState], now: datetime, override_url: str
) -> list[SimpleNamespace]:
    """Return limits as lists show them, the longest lines first; the keys of one topic are one row that unfolds."""
    found: defaultdict[tuple[str, str], list[LimitState]] = defaultdict(list)
    for state in states:
        found[parts(state.name)[:2]].append(state)
    more, listed = len(states) >= page_data.MOST_LIMITS, []
    for (_kind, what), some in found.items():
        keys = [each for each in some if parts(each.name)[2] is not None]
        if len(keys) < 2:
            listed += [(each, _row(shown, each, now, override_url)) for each in some]
        else:
            whole = stats.of_all_keys(shown.using, what, some, now)
            listed.append((whole, _family(shown, whole, keys, now, override_url, more=more)))
    return [row for _state, row in sorted(listed, key=lambda each: -each[0].waiting.count)]


def _family(
    shown: ReadOnly, whole: LimitState, keys: list[LimitState], now: datetime, override_url: str, *, more: bool
) -> SimpleNamespace:
    """Return the limit of a topic for each of its keys, with those that are overridden, and the busiest ones."""
    row, full = _row(shown, whole, now, override_url), sum(each.is_full or bool(each.waiting.count) for each in keys)
    topic = searches.term_text("topic", row.what)
    row.running_url = shown.list_url(Message, f"state:{State.RUNNING} {topic}")
    # The prefix finds all keys of the topic, but other topics, too.
    line = f"{searches.term_text('limit', whole.name)}* {topic}"
    row.waiting_url = shown.list_url(Message, line) if whole.waiting.count else ""
    row.running = str(Capped(whole.running, more))
    values = {"keys": Capped(len(keys), more), "full": f"{full:,}", "limit": terms_text(whole.limit)}
    if row.paused or not whole.is_known:
        row.use = _("%(keys)s keys: %(limit)s") % (values | {"limit": limit_text(whole, now)})
        row.gauge = SafeString("")
    else:
        row.use = _("%(keys)s keys, %(full)s full; each %(limit)s") % values
        row.gauge = charts.mix([("1", full), ("0", len(keys) - full)], kind="gauge")
    worst = sorted(keys, key=lambda each: (each.override is None, -each.waiting.count, -each.running))
    most = max(_KEYS, sum(each.override is not None for each in keys))
    row.keys, row.more = rows(shown, worst[:most], now, override_url), len(worst[most:])
    return row


def _row(shown: ReadOnly, limit: LimitState, now: datetime, override_url: str) -> SimpleNamespace:
    kind, what, key = parts(limit.name)
    running, waiting = running_text(limit.name), searches.term_text("limit", limit.name)
    row = limit.override
    return SimpleNamespace(
        name=limit.name,
        kind=_KINDS[kind],
        what=what,
        key=key,
        url=shown.url(Topics if kind == "topic" else Queue, "detail", what),
        override=row,
        overridden=row and override_facts(row, now),
        paused=bool(row and row.is_pause),
        steps=[*_steps(limit)],
        kept=[*_kept(limit)],
        override_url=of_limit(override_url, limit.name),
        use=limit_text(limit, now),
        gauge=_gauge(limit),
        running=f"{limit.running:,}",
        running_url=shown.list_url(Message, running) if limit.running else "",
        waiting=str(limit.waiting),
        waiting_url=shown.list_url(Message, waiting) if limit.waiting.count else "",
        oldest="–" if limit.oldest is None else span(now - limit.oldest),
    )


def _kept(state: LimitState) -> Iterator[tuple[str, Any]]:
    """Yield the values of an override that a click on one of its steps keeps."""
    row, limit = state.override, state.limit
    if row is not None:
        until = row.until and f"{timezone.localtime(row.until):%Y-%m-%dT%H:%M:%S}"
        given = (("limit", row.limit), ("rate", row.rate), ("until", until), ("reason", row.reason))
        yield from ((name, value) for name, value in given if value not in (None, ""))
    is_given = row is not None and row.burst is not None
    if limit is not None and limit.interval is not None and (limit.burst > 1 or is_given):
        yield "burst", limit.burst


def _steps(state: LimitState) -> Iterator[tuple[str, Any, str, str]]:
    """Yield the changes of a limit that take one click: the field of an override, its value, a label and a title."""
    if state.limit is not None:
        for label, factor in (("½", 0.5), ("×2", 2.0)):
            yield from _step(state.limit, label, factor)
    if not (state.override and state.override.is_pause):
        yield "limit", 0, _("Pause"), _("nothing begins")


def _step(limit: Limit, label: str, factor: float) -> Iterator[tuple[str, Any, str, str]]:
    if limit.count is None:
        if rate := limits.rate(limit, factor):
            yield "rate", rate, label, rate
    elif 0 < (number := round(limit.count * factor)) <= limits.MOST and number != limit.count:
        yield "limit", number, label, _("%(number)d at once") % {"number": number}


def _waiting(known: Iterable[LimitState], now: datetime) -> str:
    """Return in words how many messages wait for limits, and for how long the oldest."""
    oldest = [line.oldest for line in known if line.oldest is not None]
    values = {"number": total(line.waiting for line in known), "age": span(now - min(oldest, default=now))}
    return _("%(number)s waiting, the oldest for %(age)s") % values if oldest else ""


def _gauge(line: LimitState) -> SafeString:
    """Draw the share of a limit that is used up; nothing for a pause, nor for a rate for which nothing waits."""
    if line.limit is not None and line.limit.count is not None:
        return charts.gauge(line.running / line.limit.count) if line.limit.count else SafeString("")
    return charts.gauge(1) if line.waiting.count else SafeString("")


def running_text(limit: str) -> str:
    """Return the text of a search for the messages that run under a limit."""
    kind, what, key = parts(limit)
    texts = [f"state:{State.RUNNING}", searches.term_text(kind, what)]
    if kind == "topic":
        texts.append(searches.term_text("limit_key", key or ""))
    return " ".join(texts)
