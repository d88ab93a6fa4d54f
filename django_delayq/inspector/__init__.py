"""Questions about the record and Redis: whether they agree, how much there is, whether all is well."""
