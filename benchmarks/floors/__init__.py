"""The adapters of the three floors: what the servers and the ORM can do without django-delayq."""
