"""The adapters of the two floors: the database and the ORM without django-delayq."""
