"""The adapters of the three floors: the servers and the ORM without django-delayq."""
