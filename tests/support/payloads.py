"""Payloads that hypothesis draws."""

from __future__ import annotations

from hypothesis import strategies as st

plain_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
plain_numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(-(2.0**63), 2.0**63, exclude_max=True)
plain = st.none() | st.booleans() | plain_numbers
good = st.recursive(
    plain | plain_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(plain_text, inner, max_size=4),
    max_leaves=20,
)
