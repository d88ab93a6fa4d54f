"""Fills Redis again from the record while producers and workers go on."""
