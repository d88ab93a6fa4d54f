"""A migration that was released is never edited, renamed or deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import migrations, release
from tools.pythons import ROOT


def test_released_migrations_are_as_they_were_released() -> None:
    assert migrations.changed(ROOT) == [], "add a new migration instead"


def test_the_migrations_of_all_apps_are_found() -> None:
    apps = {Path(path).parent.as_posix() for path in migrations.digests(ROOT)}
    assert apps == {f"django_delayq{place}/migrations" for place in ("", "/console", "/http", "/recurring")}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one migration."""
    (tmp_path / "tools").mkdir()
    folder = tmp_path / "django_delayq/migrations"
    folder.mkdir(parents=True)
    (folder / "0001_initial.py").write_text("operations = []\n")
    return tmp_path


def test_before_the_first_release_nothing_is_frozen(checkout: Path) -> None:
    (checkout / "django_delayq/migrations/0001_initial.py").write_text("operations = [1]\n")
    assert migrations.changed(checkout) == []


@pytest.mark.parametrize("fate", ["edited", "renamed", "deleted"])
def test_a_released_migration_stays_as_it_is(checkout: Path, fate: str) -> None:
    migrations.freeze(checkout)
    path = checkout / "django_delayq/migrations/0001_initial.py"
    match fate:
        case "edited":
            path.write_text("operations = [1]\n")
        case "renamed":
            path.rename(path.with_name("0001_first.py"))
        case "deleted":
            path.unlink()
    assert migrations.changed(checkout) == ["django_delayq/migrations/0001_initial.py"]
    with pytest.raises(SystemExit, match=r"0001_initial\.py.*add new ones"):
        migrations.freeze(checkout)


def test_the_next_release_freezes_what_is_new(checkout: Path) -> None:
    migrations.freeze(checkout)
    (checkout / "django_delayq/migrations/0002_more.py").write_text("operations = []\n")
    assert migrations.changed(checkout) == []
    migrations.freeze(checkout)
    assert migrations.released(checkout) == migrations.digests(checkout)
    assert len(migrations.digests(checkout)) == 2


def test_a_release_asks_for_the_freeze_until_it_is_done(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "ROOT", checkout)
    (checkout / "pyproject.toml").write_text("[project]\n")
    (checkout / "CHANGELOG.rst").write_text("Unreleased\n==========\n")
    (checkout / "CONTRIBUTING.rst").write_text("")
    assert "python -m tools.migrations" in "\n".join(release.remaining("1.2.3", []))
    migrations.freeze(checkout)
    assert "python -m tools.migrations" not in "\n".join(release.remaining("1.2.3", []))
