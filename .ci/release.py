"""A release in one command: version, changelog, build, check, install tests, commit and tag. Nothing is uploaded or pushed.

In:  a clean checkout, a version, an Unreleased section with entries.      Out: dist/, a commit and a tag, all local.
Everything is built and tested in a copy first; only when all of it has passed is the checkout changed.

    make release VERSION=0.2.0                 everything, and the tag v0.2.0
    make release VERSION=0.2.0 ARGS=--dry-run  everything but the last step: the checkout stays as it is
"""

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
INTERPRETERS = ("3.11", "3.12", "3.13")
# what an installed package must do; run outside the checkout
SMOKE = """
import sys
import gd_plugin as gd, torch
assert gd.__version__ == sys.argv[1], gd.__version__
assert "site-packages" in gd.__file__, gd.__file__
vocabulary = gd.Vocabulary.from_bytes([bytes([byte]) for byte in range(256)] + [None], stop_token_ids=[256])
matcher = gd.GrammarMatcherFactory(vocabulary).create(gd.Guide.json())
assert all(matcher.accept_token(byte) for byte in b'{"a": [1]}') and matcher.is_accepting()
bitmask = gd.allocate_token_bitmask(1, 257)
matcher.fill_next_token_bitmask(bitmask, 0)
logits = gd.apply_token_bitmask_(torch.zeros(1, 257), bitmask)
assert logits[0].argmax() == 256 and (logits > float("-inf")).sum() == 1
import gd_plugin.hf.processor, gd_plugin.decoding.decoder
"""


class ReleaseError(Exception):
    """Why there is no release."""


def version_text(text: str, version: str) -> str:
    """Return version.py with the new version.

    Raises:
        ReleaseError: the version is not three numbers, or not above the present one.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"a version is three numbers, such as 0.2.0, got {version!r}")
    found = re.search(r'^__version__ = "(.*)"$', text, flags=re.MULTILINE)
    if found is None:
        raise ReleaseError("gd_plugin/version.py has no line __version__ = ...")
    if _numbers(version) < _numbers(found[1]):
        raise ReleaseError(f"version {version} is below the present one, {found[1]}")
    return text.replace(found[0], f'__version__ = "{version}"')


def changelog_text(text: str, version: str, date: str) -> str:
    """Return CHANGELOG.md with the Unreleased entries under the new version, and an empty Unreleased section.

    Raises:
        ReleaseError: there is nothing to release, or the version is there already.
    """
    if f"## [{version}]" in text:
        raise ReleaseError(f"CHANGELOG.md has a section {version} already")
    head, heading, rest = text.partition("## [Unreleased]\n")
    entries = re.split(r"^## \[", rest, maxsplit=1, flags=re.MULTILINE)[0]
    if not heading or not re.search(r"^- ", entries, flags=re.MULTILINE):
        raise ReleaseError("CHANGELOG.md has nothing under Unreleased: a release says what is new")
    return f"{head}{heading}\n## [{version}] - {date}\n{rest}"


def build(source: Path) -> list[Path]:
    """Build wheel and sdist, and let twine check them."""
    run(sys.executable, "-m", "build", "--outdir", str(source / "dist"), str(source))
    built = sorted((source / "dist").iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built))
    return built


def install_test(python: str, packages: list[Path], version: str, folder: Path) -> None:
    """Use what is installed in a clean environment: the wheel with all it requires, then in its place the sdist."""
    environment = folder / Path(python).name
    run(python, "-m", "venv", str(environment))
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    try:
        for number, package in enumerate(sorted(packages, key=lambda path: path.suffix != ".whl")):
            options = ["--no-deps", "--force-reinstall"] if number else ["-c", str(ROOT / "constraints.txt")]
            # not compiled: that takes longer than all the rest, and little of it is imported
            run(*pip, "install", "--no-compile", *options, str(package), cwd=folder)
            run(pip[0], "-I", "-W", "error::DeprecationWarning:gd_plugin", "-c", SMOKE, version, cwd=folder)
            print(f"installs and runs: {Path(python).name}, {package.name}", flush=True)
    finally:
        shutil.rmtree(environment, ignore_errors=True)  # a gigabyte


def interpreter(version: str) -> str | None:
    """Return an interpreter of this version on the path, or of pyenv's; a shim can be there without one behind it."""
    found = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    for python in filter(None, found):
        if subprocess.run([python, "--version"], capture_output=True).returncode == 0:
            return str(python)
    return None


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command; what it prints is returned, and shown if it fails.

    Raises:
        ReleaseError: it failed.
    """
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command[:6])} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def export(target: Path) -> None:
    """Copy the tracked files."""
    for name in run("git", "ls-files", "-z").split("\0"):
        if name:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def release(version: str, *, dry_run: bool, pythons: tuple[str, ...] = INTERPRETERS) -> None:
    """Do it.

    Raises:
        ReleaseError: a step failed; the checkout is as before.
    """
    if not dry_run and run("git", "status", "--porcelain"):
        raise ReleaseError("the checkout has changes: commit or stash them")
    edits = {
        "gd_plugin/version.py": version_text((ROOT / "gd_plugin/version.py").read_text(), version),
        "CHANGELOG.md": changelog_text((ROOT / "CHANGELOG.md").read_text(), version, datetime.date.today().isoformat()),
    }
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "source"
        export(source)
        for name, text in edits.items():
            (source / name).write_text(text)
        built = build(source)
        print("built and checked:", ", ".join(path.name for path in built))
        tested = 0
        for wanted in pythons:
            python = interpreter(wanted)
            if python is None:
                print(f"no python{wanted} here: not tested")
                continue
            install_test(python, built, version, Path(work))
            tested += 1
        if not tested:
            raise ReleaseError(f"none of {', '.join(pythons)} is here: nothing was tested")
        if dry_run:
            print("dry run: the checkout is as before")
            return
        for name, text in edits.items():
            (ROOT / name).write_text(text)
        (ROOT / "dist").mkdir(exist_ok=True)
        for path in built:
            shutil.copy(path, ROOT / "dist")
    run("git", "commit", "--quiet", "-m", f"Release {version}", *edits)
    run("git", "tag", "-a", f"v{version}", "-m", f"gd_plugin {version}")
    print(f"committed and tagged v{version}. To publish: git push --follow-tags, then twine upload dist/*-{version}*")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true", help="build and test, and leave the checkout as it is")
    parser.add_argument("--python", action="append", choices=INTERPRETERS, help="test under these alone")
    arguments = parser.parse_args()
    try:
        release(arguments.version, dry_run=arguments.dry_run, pythons=tuple(arguments.python or INTERPRETERS))
    except ReleaseError as error:
        raise SystemExit(f"no release: {error}") from None


if __name__ == "__main__":
    main()
