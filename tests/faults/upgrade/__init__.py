"""An upgrade under traffic, and the way back: old and new processes beside each other on real servers.

``python -m tests.faults.upgrade 2_000_000`` tries it on a table of so many messages, and says how long calls took.
The new version is made up: a copy of the package with one more column, one more index and one more topic.
"""
