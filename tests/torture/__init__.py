"""Workers, producers and a nemesis on real servers, judged by an oracle that does not import the app.

``python -m tests.torture smoke --seed 1``; see ``docs/explanation/testing.rst``.
"""
