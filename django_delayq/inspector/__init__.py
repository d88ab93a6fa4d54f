"""Inspects the record and Redis: consistency check, statistics, workers, diagnostics. It changes nothing by itself."""
