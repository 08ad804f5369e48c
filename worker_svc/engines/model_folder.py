"""What a folder with a model holds for its card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from common.errors import InvalidRequest

REQUIRED_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


def find_missing_files(folder: Path) -> list[str]:
    """Returns the required files that the folder lacks."""
    return [name for name in REQUIRED_FILES if not (folder / name).is_file()]


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Returns the ids of generation_config.json, else of config.json, as Hugging Face does."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        settings = json.loads(path.read_bytes()) if path.is_file() else {}
        if not isinstance(settings, dict):
            raise InvalidRequest(f"{name} is not a JSON object", "model_path")
        if (value := settings.get("eos_token_id")) is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()
