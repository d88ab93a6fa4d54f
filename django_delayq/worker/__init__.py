"""The processes and threads of ``run_delayq``."""
