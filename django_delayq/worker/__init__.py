"""The running system: what ``run_delayq`` runs."""
