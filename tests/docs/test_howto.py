"""The examples of the how-to guides do what the guides say."""

from __future__ import annotations

from pathlib import Path

from testproject.servers import RedisServer

from .blocks import DOCS, blocks
from .project import Project


def follow_files(project: Project, page: str) -> None:
    """Write the files of a page into a project."""
    for block in blocks(DOCS / f"{page}.rst"):
        if block.language == "python" and block.path is not None:
            project.follow(block)


def test_the_tests_of_the_guide_pass(tmp_path: Path, redis_server: RedisServer) -> None:
    with Project(tmp_path, redis_server.url) as project:
        project.run("django-admin startproject mysite")
        project.run("cd mysite")
        project.run("python manage.py startapp orders")
        follow_files(project, "tutorial")
        follow_files(project, "howto/testing")
        project.run("python manage.py makemigrations orders")
        project.run("python manage.py test")
