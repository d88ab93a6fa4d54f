"""What ``DelayqTimeline`` shows and does: imported when somebody first visits such a page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ...api import actions
from ...core.states import LIVE
from ...core.verbs import VERBS
from ...models import Message
from ...project import console_conf
from ...record import reads
from . import page, panels
from .action_table import outcomes_text
from .explanation import moment, state_label, timing

# An object's page shows this many of its messages, the newest ones.
SHOWN = 20


def show_timeline(model_admin: Any, obj: Any) -> SafeString:
    """Return the messages of an object, those that wait first."""
    using, key = router.db_for_read(Message), model_admin.get_delayq_key(obj)
    found = panels.load(f"timeline {key}", using, _read, using, key, kept=0.0)
    rows, now = found.value or ((), None)
    shown = {
        "rows": [_row(model_admin, message, now) for message in rows],
        "problem": found.problem,
        "key": key,
        "may_cancel": getattr(obj, "delayq_may_cancel", False) and not console_conf.get().READ_ONLY,
    }
    return render_to_string("delayq_console/timeline.html", shown)


def _read(using: str, key: str) -> tuple[list[Message], Any]:
    rows = Message.objects.using(using).filter(key=key).defer("payload", "headers").order_by("-pk")[:SHOWN]
    return sorted(rows, key=lambda row: (row.state not in LIVE, -row.pk)), reads.now(using)


def _row(model_admin: Any, message: Message, now: Any) -> SimpleNamespace:
    """Return what the timeline shows of one message."""
    try:
        url = reverse("admin:delayq_message_change", args=[message.pk], current_app=model_admin.admin_site.name)
    except NoReverseMatch:
        url = ""
    return SimpleNamespace(
        message=message,
        url=url,
        state=state_label(message.state),
        timing=timing(message, now),
        at=moment(message.finished_at or message.due_at, "seconds"),
        is_live=message.state in LIVE,
    )


def cancel_from_timeline(model_admin: Any, request: HttpRequest, obj: Any, number: int) -> HttpResponse:
    """Ask before a message of an object is cancelled on GET; cancel it on POST."""
    if obj is None:
        raise Http404
    needed = ["delayq.view_message", VERBS["cancel"].permission]
    is_allowed = model_admin.has_view_permission(request, obj) and request.user.has_perms(needed)
    if not is_allowed or console_conf.get().READ_ONLY:
        raise PermissionDenied
    using, back = router.db_for_write(Message), request.path.rpartition("/delayq/")[0] + "/change/"
    message = Message.objects.using(using).filter(pk=number, key=model_admin.get_delayq_key(obj)).first()
    if message is None:
        raise Http404
    if request.method != "POST":
        shown = {"message": message, "back": back, "due": moment(message.due_at, "seconds")}
        shown |= model_admin.admin_site.each_context(request)
        shown |= {"title": _("Cancel message #%(id)d?") % {"id": number}, "opts": model_admin.opts}
        return TemplateResponse(request, "delayq_console/timeline_cancel.html", shown)
    reason = request.POST.get("reason", "")
    with page.acting_as_user(request):
        answer = actions.cancel_message(message, reason=reason, using=using)
        outcomes = {str(answer.verdict.value): 1}
        page.record(request, "cancel", f"#{number}", message_id=number, reason=reason, outcomes=outcomes)
    level = messages.SUCCESS if answer else messages.WARNING
    messages.add_message(request, level, outcomes_text(outcomes))
    return HttpResponseRedirect(back)
