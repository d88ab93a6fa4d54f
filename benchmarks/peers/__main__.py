"""``python -m benchmarks.peers install [names] [--peers DIR]``: make an environment for each peer, by pip or by npm."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.driver import PEERS
from benchmarks.systems import SYSTEMS, System


def install(system: System, peers: Path) -> bool:
    """Make or renew the environment. Return False when a package cannot be installed."""
    home = system.home(peers)
    if system.is_node:
        return _install_for_node(system, home, peers)
    if not system.installed(peers):
        venv.create(home, with_pip=True)
    pip = [str(system.program(peers)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, *system.packages], check=False).returncode == 0:
        return True
    # An environment without its Python counts as not installed.
    system.program(peers).unlink(missing_ok=True)
    return False


def _install_for_node(system: System, home: Path, peers: Path) -> bool:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        print("Node.js and npm are not on PATH", file=sys.stderr)
        return False
    home.mkdir(parents=True, exist_ok=True)
    command = [npm, "install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts", "--prefix", str(home)]
    if subprocess.run([*command, *system.packages], check=False).returncode == 0:
        return True
    shutil.rmtree(system.modules(peers), ignore_errors=True)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("verb", choices=["install"])
    parser.add_argument("names", nargs="*", help="all, if none is named")
    parser.add_argument("--peers", type=Path, default=PEERS, metavar="DIR", help=f"default {PEERS}")
    arguments = parser.parse_args()
    peers = {system.name: system for system in SYSTEMS if system.kind == "peer"}
    if unknown := set(arguments.names) - peers.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(peers)}")
    for name in arguments.names or peers:
        done = install(peers[name], arguments.peers)
        print(f"{name:<16} {'installed' if done else 'cannot be installed'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
