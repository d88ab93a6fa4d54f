"""Builds a release, tries it, and says what remains for a person to do: ``tox -e release``. It publishes nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from testproject.servers import PostgresServer, RedisServer, find_postgres, find_redis

from . import migrations, pythons
from .pythons import ROOT
from .trial import Trial

# What a checkout has and a source distribution does not need.
OF_CHECKOUT = ".ci/"


def main(folder: Path) -> None:
    """Build into ``folder`` and go through all checks; the first that fails ends the program."""
    shutil.rmtree(folder, ignore_errors=True)
    _call("-m", "build", "--outdir", str(folder), str(ROOT))
    wheel, sdist = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    _call("-m", "twine", "check", "--strict", str(wheel), str(sdist))
    compare("wheel", in_wheel(wheel), {name for name in tracked() if name.startswith("django_delayq/")})
    compare("sdist", in_sdist(sdist), {name for name in tracked() if not name.startswith(OF_CHECKOUT)})
    missing = try_on_each_python(wheel)
    print("\nBuilt and tried:", wheel.name, "and", sdist.name, f"in {folder}")
    print("\nWhat remains for a person:")
    version = wheel.name.split("-")[1]
    for number, task in enumerate(remaining(version, missing), 1):
        print(f"{number:3}. {task}")


def tracked() -> set[str]:
    """The files that git knows, or all files where this is no checkout."""
    if not (ROOT / ".git").exists():
        sys.exit("A release is built from a checkout of git.")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.split("\0")) - {""}


def in_wheel(wheel: Path) -> set[str]:
    """The files of a wheel, without those that tell about the package."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def in_sdist(sdist: Path) -> set[str]:
    """The files of a source distribution, without its metadata."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    return names - {"PKG-INFO"}


def compare(what: str, found: set[str], expected: set[str]) -> None:
    """End the program when files are missing in an archive, or when it has files that it should not have."""
    lines = [f"  missing: {name}" for name in sorted(expected - found)]
    lines += [f"  should not be there: {name}" for name in sorted(found - expected)]
    if lines:
        sys.exit("\n".join([f"The {what} does not have what it should:", *lines]))
    print(f"The {what} has its {len(found)} files, and no others.")


def try_on_each_python(wheel: Path) -> list[str]:
    """Try the wheel on each supported Python of this machine, and return the versions that it does not have."""
    missing = []
    for version in pythons.supported():
        interpreter = pythons.find(version)
        if interpreter is None:
            missing.append(version)
        else:
            _try(wheel, version, interpreter)
    if len(missing) == len(pythons.supported()):
        sys.exit("This machine has none of the supported Pythons.")
    return missing


def _try(wheel: Path, version: str, interpreter: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="delayq-release-") as name:
        folder = Path(name)
        trial = Trial(interpreter, folder)
        django = trial.install(wheel)
        sqlite: dict[str, object] = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "db.sqlite3")}
        trial.deliver("sqlite", sqlite, None)
        places = ["SQLite without Redis"]
        if find_postgres() and find_redis():
            with PostgresServer() as postgres, RedisServer() as redis:
                trial.deliver("postgresql", _settings_of(postgres), redis.url)
            places.append("PostgreSQL with Redis")
        print(f"Python {version}, Django {django}: installed, migrated, delivered on {' and on '.join(places)}.")


def _settings_of(server: PostgresServer) -> dict[str, object]:
    place = {"HOST": "127.0.0.1", "PORT": server.port, "USER": server.user, "NAME": server.dbname}
    return {"ENGINE": "django.db.backends.postgresql", **place}


def remaining(version: str, missing: Iterable[str]) -> Iterator[str]:
    """What no command can do, in the order in which a person does it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.rst").read_text(encoding="utf-8")
    if versions := " and ".join(missing):
        yield f"See the tests pass on Python {versions}, which this machine does not have."
    if "urls" not in project:
        yield "Give pyproject.toml its [project.urls], and the picture of the README its address, once they exist."
    if not re.search(rf"^{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        yield f"Choose the version (it is {version}), and give CHANGELOG.rst a section named 'VERSION (YYYY-MM-DD)'."
    if "(to be filled in)" in (ROOT / "CONTRIBUTING.rst").read_text(encoding="utf-8"):
        yield "Name the maintainers, in CONTRIBUTING.rst and in .github/CODEOWNERS."
    if migrations.released(ROOT) != migrations.digests(ROOT):
        yield "Freeze the migrations, in the commit of the version: python -m tools.migrations"
    yield "See tests/console/admin/test_language.py skip nothing: what it skips are texts that want their translation."
    yield "Give the repository an environment 'release' that asks a reviewer, once: without it a tag publishes at once."
    yield "Register the workflow release.yml as a trusted publisher with the package index, once."
    yield f"See the workflows green on main; then: git tag --sign v{version} && git push origin v{version}"
    yield "Approve the environment 'release' of the workflow that the tag starts: it builds again, and publishes."
    yield "Install the published version in an empty environment, and start the next version in CHANGELOG.rst."


def _call(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
