"""Loader of a model's tokenizer from local files, never from the network.

transformers costs 4 s and 200 MB: it is imported when a tokenizer is loaded, and no data plane loads a tokenizer.
"""

import os
from pathlib import Path
from typing import Any

from tracefile.records.errors import InputError
from tracefile.records.extras import load_extra

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def tokenizer_folder(path: Path, *, alternatives: str = "") -> Path:
    """Return the tokenizer's folder (``path`` or its parent); raises InputError naming ``alternatives`` of the flag."""
    folder = path.parent if path.is_file() and path.name in TOKENIZER_FILES else path
    if folder.is_dir() and any((folder / name).is_file() for name in TOKENIZER_FILES):
        return folder
    raise InputError(f"--tokenizer {path}: no tokenizer there; expected a directory with tokenizer.json{alternatives}")


def load_tokenizer(folder: Path) -> Any:
    """Return the transformers tokenizer in ``folder``; raises InputError."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    transformers = load_extra("transformers", where=f"--tokenizer {folder}: ")
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken tokenizer file may raise anything, and is bad input
        raise InputError(
            f"--tokenizer {folder}: cannot be loaded ({type(error).__name__}); expected the model's tokenizer files"
        ) from error
