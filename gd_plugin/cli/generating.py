"""`gd-plugin generate`: a model writes one document that obeys a guide.

In:  a model, a guide, a prompt.      Out: the document on standard output, its making on standard error, an exit code.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from gd_plugin.cli.inputs import UserError, load_model, read_text
from gd_plugin.cli.output import print_json, printable, stderr
from gd_plugin.errors import GuideError
from gd_plugin.grammars.vocabulary import Vocabulary, text_of
from gd_plugin.guides.guide import Guide
from gd_plugin.hf.processor import GuidedLogitsProcessor

__all__ = ["GenerateOptions", "generate_document"]

# characters of the stream's end that stay in view
_SHOWN = 800


@dataclass(frozen=True)
class GenerateOptions:
    """What was asked for; the fields are the command's options."""

    model: str
    guide: Guide
    prompt: str | None
    max_new_tokens: int
    report: str | None
    chat: bool
    sample: bool
    temperature: float
    seed: int
    cut_off: bool
    quiet: bool
    backend: str


def generate_document(options: GenerateOptions, *, as_json: bool) -> int:
    """Generate, write the document and the report, and return the exit code.

    Raises:
        UserError: the model or the prompt cannot be read, or the report's name says no format.
        GuideError: no backend can enforce the guide.
    """
    report_path = None if options.report is None else _report_path(options.report)
    prompt = _prompt(options.prompt)
    console = stderr()
    with _spinner(console, f"Loading {options.model}", options.quiet):
        model, tokenizer = load_model(options.model)
        processor = GuidedLogitsProcessor(
            options.guide,
            tokenizer=tokenizer,
            model=model,
            backend=options.backend,
            max_new_tokens=None if options.cut_off else options.max_new_tokens,
            report=report_path is not None,
        )
    inputs = _inputs(tokenizer, prompt, options.chat)
    start = time.perf_counter()
    with _stream(console, processor.vocabulary, options) as streamer:
        try:
            output = _generated(model, inputs, processor, streamer, options)
        except GuideError:  # also a ValueError; its hint is told on a line of its own
            raise
        except ValueError as error:
            # a budget below the shortest document; the message says how many tokens are needed
            raise UserError(str(error)) from error
    seconds = time.perf_counter() - start
    [result] = processor.results(output)
    if as_json:
        record = {"status": result.status, "text": result.text, "num_tokens": result.num_tokens, "seconds": seconds}
        print_json({**record, "intervened": result.intervened, "error": result.error and str(result.error)})
    else:
        document = result.text or ""
        # a terminal would obey control characters; a file or a pipe gets the document as it is
        sys.stdout.write((printable(document, keep="\n\t") if sys.stdout.isatty() else document) + "\n")
        sys.stdout.flush()
    if report_path is not None:
        # behind the document: that is not lost where the report cannot be written
        report = processor.report(output)
        text = report.to_html() if report_path.suffix == ".html" else report.to_json()
        try:
            report_path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--report {report_path}: {error.strerror}") from error
    if not options.quiet:
        closed = ", closed by the budget" if result.intervened else ""
        speed = f"{result.num_tokens / seconds:.1f} tokens/s"
        console.print(f"{result.status}: {result.num_tokens} tokens, {speed}{closed}", style="dim")
    if result.status != "complete" and result.error is not None:
        console.print(printable(str(result.error)), markup=False)
    return 0 if result.status == "complete" else 1


def _report_path(name: str) -> Path:
    """Return the report's path; what cannot be written is said before a model is loaded."""
    path = Path(name)
    if path.suffix not in (".html", ".json"):
        raise UserError(f"--report {name}: the name must end in .html or .json")
    if not path.parent.is_dir():
        raise UserError(f"--report {name}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"--report {name}: this is a folder; name a file")
    existed = path.exists()
    if existed and not path.is_file():  # a pipe or a device is opened once, when there is a report
        return path
    try:
        # opened for more text, so that a report which stands there is kept until there is a new one
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(f"--report {name}: {error.strerror}") from error
    return path


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    if sys.stdin.isatty():
        raise UserError("no prompt: pass --prompt TEXT, or give it on standard input")
    return read_text("-", 1).text


def _inputs(tokenizer: Any, prompt: str, chat: bool) -> dict[str, Any]:
    if not chat:
        inputs = dict(tokenizer(prompt, return_tensors="pt"))
        inputs.pop("token_type_ids", None)
        if not inputs["input_ids"].numel():
            raise UserError("the prompt is empty: pass --prompt TEXT, or give it on standard input")
        return inputs
    try:
        turns = [{"role": "user", "content": prompt}]
        return dict(
            tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        )
    except ValueError as error:
        raise UserError(f"--chat: this tokenizer has no chat template: {str(error).splitlines()[0]}") from error


def _generated(
    model: Any, inputs: dict[str, Any], processor: GuidedLogitsProcessor, streamer: Any, options: GenerateOptions
) -> Any:
    import torch

    # the model's own settings for sampling would be in the way of greedy search, with a warning each
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if options.sample:
        torch.manual_seed(options.seed)
        sampling = {"do_sample": True, "temperature": options.temperature}
    with torch.inference_mode():
        return model.generate(
            **inputs,
            **sampling,
            max_new_tokens=options.max_new_tokens,
            logits_processor=[processor],
            streamer=streamer,
            pad_token_id=processor.vocabulary.stop_token_ids[0],
        )


@contextlib.contextmanager
def _spinner(console: Console, note: str, quiet: bool) -> Iterator[None]:
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(printable(note)):
        yield


@contextlib.contextmanager
def _stream(console: Console, vocabulary: Vocabulary, options: GenerateOptions) -> Iterator[Any]:
    """Yield what `generate` takes as streamer: a bar and the text on a terminal, the text alone elsewhere."""
    if options.quiet:
        yield None
        return
    if not console.is_terminal:
        yield _PlainStreamer(console, vocabulary)
        console.file.write("\n")
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=console)
    task = progress.add_task("tokens", total=options.max_new_tokens)
    with Live(progress, console=console, transient=True, refresh_per_second=12) as live:
        yield _LiveStreamer(live, progress, task, vocabulary)


class _Streamer:
    """Receives the tokens of one row from `generate`; the first call brings the prompt."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._in_prompt = True

    def put(self, value: Any) -> None:
        """Take the next tokens."""
        if self._in_prompt:
            self._in_prompt = False
            return
        self._ids.extend(i for i in value.reshape(-1).tolist() if i not in self._vocabulary.stop_token_set)
        self.show(text_of(self._vocabulary, self._ids))

    def show(self, text: str) -> None:
        """Show the text so far."""
        raise NotImplementedError

    def end(self) -> None:
        """Nothing: the document is printed when all is known of it."""


class _PlainStreamer(_Streamer):
    def __init__(self, console: Console, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._file = console.file
        self._num_shown = 0

    def show(self, text: str) -> None:
        self._file.write(text[self._num_shown :])
        self._file.flush()
        self._num_shown = len(text)


class _LiveStreamer(_Streamer):
    def __init__(self, live: Live, progress: Progress, task: Any, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._live, self._progress, self._task = live, progress, task

    def show(self, text: str) -> None:
        lines = "\n".join(map(printable, text[-_SHOWN:].split("\n")))
        self._progress.update(self._task, completed=len(self._ids))
        self._live.update(Group(Text(lines), self._progress))
