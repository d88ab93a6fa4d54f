"""Why a topic is still: its queue is paused, its limit is full or 0, no worker has its handler, or all are busy."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from django_delayq import override_limit, pause_queue
from django_delayq.core.actors import acting_as
from django_delayq.record.sql.rows import Ticket
from tests.support.limits import Declare, claim_limited

from . import samples
from .samples import DB, TOPIC, late, many, text, worker

pytestmark = pytest.mark.django_db(transaction=True)

URL = samples.admin_url("topics_changelist")


def badges(page: Any) -> list[tuple[str, str]]:
    """Return the badges with links on a page: what they say, and the sentence in their titles."""
    found = re.findall(r'<a class="dq-badge[^"]*" href="[^"]+" title="([^"]*)">([^<]*)</a>', page.content.decode())
    return [(badge, samples.plain(title)) for title, badge in found]


def only_badge(viewer: Client) -> tuple[str, str]:
    """Return the one badge of the list of topics, which the page of the topic says in words."""
    ((badge, sentence),) = badges(viewer.get(URL))
    assert sentence.partition(", the oldest")[0] in text(viewer.get(f"{URL}{TOPIC}/detail/"))
    return badge, sentence


def test_a_topic_waits_for_its_queue_that_somebody_paused(viewer: Client) -> None:
    worker()
    late(*many(3), seconds=7200)
    with acting_as("user:anna"):
        pause_queue("default", reason="the bank is down")
    badge, sentence = only_badge(viewer)
    assert badge == "queue paused"
    assert sentence.startswith("3 waiting: queue default is paused, the oldest for 2 h · by anna · ")
    assert "the bank is down" in sentence


def test_a_topic_waits_for_a_handler_that_no_live_worker_has(viewer: Client) -> None:
    worker(topics=["other"])
    worker("elsewhere", ("mail",))
    worker("dead", seen=1000)
    many(2, delay=0)
    badge, sentence = only_badge(viewer)
    assert badge == "no handler"
    assert sentence.startswith("2 waiting: no live worker of queue default has the handler")


def test_a_topic_that_was_never_delivered_is_listed_while_it_waits(viewer: Client) -> None:
    many(2, delay=0)
    many(1, topic="t.later")
    assert [row.name for row in viewer.get(URL).context["rows"]] == [TOPIC]
    assert [row.name for row in viewer.get(URL, {"order": "waiting"}).context["rows"]] == [TOPIC]


@pytest.mark.parametrize("name", ["topic", "queue"])
def test_a_topic_waits_for_a_limit_that_is_full(viewer: Client, declare: Declare, queue_limits: Any, name: str) -> None:
    terms = {"limit": 1}
    declare(TOPIC, **(terms if name == "topic" else {}))
    queue_limits(**({} if name == "topic" else {"default": terms}))
    worker()
    made = many(4, delay=0)
    claim_limited(DB, [Ticket(message.pk) for message in made], {TOPIC: 60.0}, samples.WORKER)
    badge, sentence = only_badge(viewer)
    assert badge == "limited"
    assert sentence.startswith(f"3 waiting for the limit of {name} {TOPIC if name == 'topic' else 'default'}, ")


def test_the_lines_of_the_keys_of_a_topic_are_one_obstacle(viewer: Client, declare: Declare) -> None:
    declare(TOPIC, limit=1)
    worker()
    made = [message for key in ("a", "b") for message in many(3, delay=0, limit_key=key)]
    claim_limited(DB, [Ticket(message.pk) for message in made], {TOPIC: 60.0}, samples.WORKER)
    assert only_badge(viewer)[1].startswith(f"4 waiting for the limit of topic {TOPIC}, ")


def test_a_topic_with_a_limit_of_0_is_paused(viewer: Client) -> None:
    worker()
    many(2, delay=0)
    with acting_as("user:anna"):
        override_limit(topic=TOPIC, limit=0, reason="so")
    badge, sentence = only_badge(viewer)
    assert badge == "paused"
    assert re.match(rf"2 waiting: topic {TOPIC} is paused, the oldest for .* · by anna · .* ago · “so”", sentence)


def test_a_key_that_is_paused_is_told_and_not_the_topic(viewer: Client, declare: Declare) -> None:
    declare(TOPIC, limit=1)
    worker()
    many(1, delay=0, limit_key="acme")
    override_limit(topic=TOPIC, limit=5, reason="other")
    with acting_as("user:anna"):
        override_limit(topic=TOPIC, limit_key="acme", limit=0, reason="so")
    badge, sentence = only_badge(viewer)
    assert badge == "paused"
    assert sentence.startswith(f"1 waiting: topic {TOPIC}, key acme is paused, the oldest for ")
    assert re.search(r" · by anna · .* ago · “so”$", sentence)


def test_a_pause_of_a_topic_is_told_beside_that_of_its_queue(viewer: Client) -> None:
    worker()
    many(2, delay=0)
    override_limit(topic=TOPIC, limit=0, reason="so")
    pause_queue("default")
    assert only_badge(viewer)[0] == "queue paused"
    assert 'dq-state-paused" title="so">paused<' in viewer.get(URL).content.decode()


def test_a_pause_of_a_queue_by_its_limit_is_told_beside_that_of_a_topic(viewer: Client) -> None:
    worker()
    many(2, delay=0)
    override_limit(topic=TOPIC, limit=0, reason="of the topic")
    override_limit(queue="default", limit=0, reason="of the queue")
    page = viewer.get(samples.admin_url("queue_detail", "default")).content.decode()
    assert 'dq-state-paused" title="of the queue">paused<' in page


def test_overdue_messages_that_nothing_keeps_are_for_busy_workers(viewer: Client) -> None:
    worker()
    late(*many(2), seconds=600)
    many(5, delay=0)
    badge, sentence = only_badge(viewer)
    assert badge == "overdue"
    assert sentence.startswith("2 overdue: the workers of queue default are busy, or too few, the oldest for 10 m")
    (row,) = viewer.get(URL).context["rows"]
    assert (str(row.due.number), samples.plain(row.due.age)[:4]) == ("7", "10 m")
    assert len(viewer.get(row.due_url).context["cl"].result_list) == 7


def test_the_list_opens_with_what_holds_topics_back(viewer: Client, boss: Client, declare: Declare) -> None:
    assert viewer.get(URL).context["title"] == "No topic is held back"
    declare(TOPIC, limit=1)
    worker(topics=[TOPIC])
    made = many(3, delay=0)
    claim_limited(DB, [Ticket(message.pk) for message in made], {TOPIC: 60.0}, samples.WORKER)
    assert viewer.get(URL).context["title"] == "1 topic is held back"
    many(4, delay=0, topic="t.off")
    override_limit(topic="t.off", limit=0)
    many(3, delay=0, topic="t.mail", queue="mail")
    many(2, delay=0, topic="t.post", queue="mail")
    pause_queue("mail")
    page = boss.get(URL)
    assert page.context["title"] == "4 topics are held back"
    said = [(topics, each.text.partition(",")[0]) for each, topics, _resume in page.context["held"]]
    # What stops comes before a limit, which lets messages begin.
    assert said == [
        ("t.mail, t.post", "5 waiting: queue mail is paused"),
        ("t.off", "4 waiting: topic t.off is paused"),
        (TOPIC, f"2 waiting for the limit of topic {TOPIC}"),
    ]
    html = page.content.decode()
    assert 'href="/admin/delayq/queue/mail/resume/">Resume…</a>' in html
    assert 'name="name" value="topic t.off"' in html
    assert "Resume" not in viewer.get(URL).content.decode()


def test_nothing_keeps_a_topic_whose_messages_are_only_just_due(viewer: Client) -> None:
    worker()
    many(2, delay=0)
    assert badges(viewer.get(URL)) == []


def test_the_page_of_a_queue_says_what_its_topics_wait_for(viewer: Client) -> None:
    many(2, delay=0)
    page = viewer.get(samples.admin_url("queue_detail", "default"))
    assert [row.name for row in page.context["rows"]] == [TOPIC]
    assert "2 waiting: no live worker of queue default has the handler" in text(page)
