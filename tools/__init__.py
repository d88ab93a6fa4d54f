"""Commands for those who keep the project: ``tox -e release``."""
