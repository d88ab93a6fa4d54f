"""An operator makes a token in a browser, copies it, limits it and revokes it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from django_delayq.http import tokens

from .chromium import expect
from .conftest import Open
from .tour import Tour

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("configure")]

LIST = "/admin/delayq_http/token/"


def test_a_token_is_made_copied_limited_and_revoked(open_page: Open) -> None:
    tour = Tour(open_page(permissions=["clipboard-read"]))
    page = tour.page
    tour.visit("tokens-empty", LIST, dark=False)
    page.get_by_role("link", name="Make the first token…").click()
    page.get_by_label("Namespace:").fill("shop")
    page.get_by_label("Description:").fill("the Go service")
    tour.look("token-add")
    page.get_by_role("button", name="Make the token").click()
    for place in (0, 1):
        shown = page.locator("pre").nth(place).inner_text().strip()
        page.get_by_role("button", name="Copy", exact=True).nth(place).click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == shown
        expect(page.get_by_role("button", name="Copied")).to_be_hidden()
    tour.look("token-made")
    page.get_by_role("link", name="I have copied it").click()
    row = page.get_by_role("row").filter(has_text="the Go service")
    row.get_by_role("link", name="Limit…").click()
    page.get_by_label("Reads:").fill("100")
    page.get_by_label("Interval in seconds:").fill("10")
    tour.look("token-limit")
    page.get_by_role("button", name="Change the limit").click()
    expect(row).to_contain_text("100 reads in 10 s")
    row.get_by_role("link", name="Revoke…").click()
    tour.look("token-revoke")
    page.get_by_role("button", name="Revoke").click()
    expect(page.locator("#content-main")).to_contain_text("No program gets in by HTTP yet")
    tour.end()


def test_a_list_of_tokens_is_sound(open_page: Open) -> None:
    for place, description in enumerate(("the Go service", "imports of the warehouse, twice a day", "")):
        lasts = (timedelta(days=3), timedelta(days=90), None)[place]
        token, _text = tokens.make("shop" if place else "warehouse-of-the-north", lasts=lasts, description=description)
        if place == 1:
            tokens.limit(token, 100, 200, 10)
    tokens.make("old", ["consume"], lasts=timedelta(days=-1))
    tour = Tour(open_page())
    tour.visit("tokens", LIST)
    page = tour.page
    page.get_by_role("link", name="Last used").click()
    expect(page.get_by_role("columnheader", name="Last used")).to_have_attribute("aria-sort", "ascending")
    page.get_by_role("link", name="valid (3)").click()
    expect(page.locator("tbody tr")).to_have_count(3)
    for box in page.locator(".action-select").all():
        box.check()
    page.get_by_role("button", name="Revoke…").click()
    tour.look("tokens-revoke")
    page.get_by_role("button", name="Revoke").click()
    expect(page.locator("#content-main")).to_contain_text("No tokens match.")
    tour.end()
