"""Django's own tests of its task framework, run against the backend: ``python -m tests.contrib.tasks.contract``."""
