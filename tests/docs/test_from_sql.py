"""The examples of the page *From SQL* do what it says, in the languages that are there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from django.db import ProgrammingError, connection, transaction

from django_delayq.models import Message
from tests.support.from_sql import cancel, schedule

from .blocks import DOCS, Block, blocks, text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgresql("SQLite has no functions")]

PAGE = DOCS / "reference/from-sql.rst"
NODE = shutil.which("node")


def examples(*languages: str) -> list[Block]:
    return [block for block in blocks(PAGE) if block.language in languages]


def sql_with(text: str) -> str:
    [found] = [block.text for block in examples("sql", "postgresql") if text in block.text]
    return found


def execute(sql: str, parameters: Any = None) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


@pytest.fixture
def orders() -> Iterator[None]:
    """The table of the examples."""
    execute("CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, status text NOT NULL)")
    yield
    execute("DROP TABLE orders; DROP FUNCTION IF EXISTS orders_close_later")


def only(topic: str) -> Message:
    return Message.objects.get(topic=topic)


def test_the_first_example_schedules_and_the_second_cancels() -> None:
    execute(sql_with("""('orders.close', '{"order": 5}'"""))
    message = only("orders.close")
    assert (message.payload, message.key) == ({"order": 5}, "order-5")
    assert timedelta(0) <= message.due_at - message.created_at - timedelta(minutes=15) < timedelta(milliseconds=1)
    [answers] = execute(sql_with("SELECT delayq_cancel(5)").replace("(5)", f"({message.pk + 1})"))
    assert answers == ("not found", "cancelled")
    assert message.transitions.get(to_state="cancelled").reason == "paid"


def test_the_trigger_schedules_for_each_row(orders: None) -> None:
    execute(sql_with("CREATE TRIGGER"))
    execute("INSERT INTO orders (status) VALUES ('new'), ('new')")
    assert {message.key for message in Message.objects.filter(topic="orders.close")} == {"order-1", "order-2"}
    with transaction.atomic():
        execute("INSERT INTO orders (status) VALUES ('new')")
        transaction.set_rollback(True)
    assert Message.objects.count() == 2


def test_the_line_for_psql_spreads_messages_and_may_be_repeated(orders: None) -> None:
    execute("INSERT INTO orders (status) SELECT 'new' FROM generate_series(1, 120)")
    first = execute(sql_with("random()"))
    assert len(first) == Message.objects.filter(priority=-10).count() == 100
    assert execute(sql_with("random()")) == first


def test_the_hook_of_dbt_is_such_a_call() -> None:
    [block] = examples("jinja")
    hook = re.search(r'post_hook="(.+)"\)', block.text)
    assert hook is not None
    execute(hook[1].replace("{{ this }}", "sales.daily"))
    assert only("reports.built").payload == {"model": "sales.daily"}


def test_go_sends_statements_that_the_server_understands(orders: None) -> None:
    """Go is not run: the statements of the example are, with parameters as its driver sends them."""
    [block] = examples("go")
    update, call = re.findall(r'"((?:UPDATE|SELECT) .+)"', block.text)
    execute("INSERT INTO orders (status) VALUES ('new')")
    with psycopg.connect(**connection.get_connection_params() | {"cursor_factory": None, "context": None}) as other:
        cursor = psycopg.RawCursor(other)
        cursor.execute(update, [1])
        cursor.execute(call, ['{"order": 1}', timedelta(days=1), "order-1"])
    message = only("orders.remind")
    assert (message.payload, message.key) == ({"order": 1}, "order-1")
    assert execute("SELECT status FROM orders") == [("sent",)]


def has_pg() -> bool:
    """Tell whether Node is there with its package ``pg``, which NODE_PATH may name."""
    return (
        NODE is not None
        and subprocess.run([NODE, "-e", "require('pg')"], capture_output=True, check=False).returncode == 0
    )


def test_node_runs_its_example(orders: None, tmp_path: Path) -> None:
    if NODE is None or not has_pg():
        pytest.skip("needs Node with the package pg; NODE_PATH names its folder")
    [block] = examples("javascript")
    (tmp_path / "place.js").write_text(block.text)
    given = connection.get_connection_params()
    password = quote(str(given.get("password") or ""))
    url = f"postgresql://{given['user']}:{password}@{given['host']}:{given['port']}/{given['dbname']}"
    ran = subprocess.run(
        [NODE, str(tmp_path / "place.js")],
        env={**os.environ, "DATABASE_URL": url},
        capture_output=True,
        check=False,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    message = only("orders.pack")
    assert int(ran.stdout) == message.pk
    assert (message.payload, message.key) == ({"order": "1"}, "order-1")


def test_node_sends_statements_that_the_server_understands(orders: None) -> None:
    """Where Node is not there."""
    [block] = examples("javascript")
    insert, call = re.findall(r'"((?:INSERT|SELECT) .+)"', block.text)
    with psycopg.connect(**connection.get_connection_params() | {"cursor_factory": None, "context": None}) as other:
        cursor = psycopg.RawCursor(other)
        order = cursor.execute(insert).fetchone()
        assert order is not None
        cursor.execute(call, [f'{{"order": {order[0]}}}', "90 seconds", f"order-{order[0]}"])
    assert only("orders.pack").key == "order-1"


# --- rights -----------------------------------------------------------------------------------------------------------


@contextmanager
def billing(*grants: str) -> Iterator[None]:
    """Be a role with these rights."""
    execute("CREATE ROLE billing")
    try:
        for grant in grants:
            execute(grant)
        execute("SET ROLE billing")
        try:
            yield
        finally:
            execute("RESET ROLE")
    finally:
        execute("DROP OWNED BY billing; DROP ROLE billing")


def test_the_fewest_rights_schedule_and_do_nothing_else() -> None:
    with billing(sql_with("GRANT SELECT (id")):
        pk = schedule("orders.close", {"order": 5}, key="k")
        assert schedule("orders.close", key="k", on_conflict="keep") == pk
        assert schedule("orders.close", {"order": 6}, expires="1 hour", headers={"a": 1}) > pk
        with pytest.raises(ProgrammingError, match="permission denied"):
            execute("SELECT payload FROM delayq_message")
        with pytest.raises(ProgrammingError, match="permission denied"):
            cancel(pk)
    first = Message.objects.get(pk=pk).transitions.get()
    assert first.actor == "sql:billing"


def test_the_other_rights_cancel_and_free_keys() -> None:
    with billing(sql_with("GRANT SELECT, INSERT, UPDATE")):
        pk = schedule("orders.close", key="k", expires="1 us")
        other = schedule("orders.close", key="k")
        assert other != pk
        assert cancel(other) == "cancelled"
    assert [move.actor for move in Message.objects.get(pk=pk).transitions.all()] == ["sql:billing", "sql:billing"]


# --- the page and the functions ---------------------------------------------------------------------------------------


def test_the_page_names_the_arguments_with_their_types() -> None:
    [(arguments,)] = execute("SELECT pg_get_function_arguments(oid) FROM pg_proc WHERE proname = 'delayq_schedule'")
    types = {"timestamp with time zone": "timestamptz", "integer": "int"}
    declared = set()
    for argument in re.split(r", (?=\"?\w+\"? \w+)", arguments):
        name, type_ = argument.partition(" DEFAULT ")[0].split(" ", 1)
        declared.add(f"{name} {types.get(type_, type_)}")
    assert (
        set(re.findall(r'``("?\w+"? (?:text|jsonb|int|interval|timestamptz))``', text_of("reference/from-sql")))
        == declared
    )


def test_the_advice_for_a_renamed_schema_works() -> None:
    page = text_of("reference/from-sql")
    [advice] = re.findall(r"``(ALTER FUNCTION acme\.delayq_schedule .+?)``", page)
    for name in ("delayq_schedule", "delayq_cancel", "delayq_move"):
        assert f"``{name}``" in page or name in advice
        execute(advice.replace("acme.delayq_schedule", name).replace("acme", "public"))
    assert cancel(schedule("orders.close")) == "cancelled"
