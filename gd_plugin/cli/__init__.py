"""The `gd-plugin` command: check, lint, explain, generate, bench and doctor.

In:         guides from files, texts, folders of models      Out: answers for people, or for machines with --json
May import: anything                                         Read: app, then the module named like the command
"""

import sys
from importlib.util import find_spec

__all__ = ["main"]


def main() -> None:
    """Run the command and exit. Without the packages of the extra `cli`, say how to install them."""
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"gd-plugin needs {' and '.join(missing)}: pip install 'gd_plugin[cli]'\n")
        sys.exit(2)
    try:
        from gd_plugin.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while it was still being imported
        code = 130
    sys.exit(code)
