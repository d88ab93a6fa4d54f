"""The tables of the documentation that are made from the code are up to date."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from django_delayq import RetryPolicy
from django_delayq.project import conf, console_conf, http_conf
from docs import tables

from .blocks import text_of

ALL: dict[str, Any] = {
    **conf.Settings._field_defaults,
    **console_conf.ConsoleSettings._field_defaults,
    **http_conf.HttpSettings._field_defaults,
}


@pytest.mark.parametrize("path", tables.pages(), ids=lambda path: path.stem)
def test_a_page_has_the_tables_that_the_script_makes(path: Path) -> None:
    page = path.read_text("utf-8")
    assert page == tables.with_tables(page), "run python -m docs.tables"


def test_every_setting_has_one_row() -> None:
    rows = re.findall(r"^``([A-Z_]+)``  ", text_of("reference/settings"), re.MULTILINE)
    assert sorted(rows) == sorted([*ALL, "TESTING"])


@pytest.mark.parametrize("name", ALL)
def test_a_default_means_itself_as_the_table_writes_it(name: str) -> None:
    written = eval(tables.default(ALL[name]), {"RetryPolicy": RetryPolicy})
    assert {**conf.PARSERS, **console_conf.PARSERS, **http_conf.PARSERS}[name](written) == ALL[name]
