"""The page for those who come from lmstfy, gmq or youzan: its requests, as curl sends them."""

from __future__ import annotations

import base64
import shlex

from tests.docs.blocks import DOCS, blocks, text_of
from tests.http.conftest import Wire


def test_the_requests_of_the_page(wire: Wire) -> None:
    (block,) = [block for block in blocks(DOCS / "howto/from-lmstfy.rst") if block.language == "console"]
    answers, job = [], ""
    for command, _output in block.commands:
        words = [word.replace("$JOB", job) for word in shlex.split(command)]
        method = words[words.index("-X") + 1] if "-X" in words else "GET"
        body = words[words.index("-d") + 1].encode() if "-d" in words else b""
        (address,) = [word for word in words if word.startswith("https://example.org/")]
        status, content = wire(
            method, address.removeprefix("https://example.org").replace("/api/shop/", "/api/ns1/"), body
        )
        job = content["job_id"] if content else job
        answers.append((status, base64.b64decode((content or {}).get("data", ""))))
    assert answers == [(201, b""), (200, b"this is a job"), (204, b"")]


def test_what_the_tables_name_is_there(wire: Wire) -> None:
    page = text_of("howto/from-lmstfy")
    for request in ("PUT /api/shop/orders?delay=20", "PUT /api/shop/orders?delay=3600&tries=65535&ttl=0"):
        assert f"``{request}``" in page
        method, path = request.replace("/shop/", "/ns1/").split()
        assert wire(method, path, b"x")[0] == 201
