"""A model folder for workers that run no model: small weights, a real tokenizer, long contexts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # where pytest finds it, too

from tiny_model import write_tiny_model


def write_fake_model(folder: Path, tokenizer_from: Path) -> Path:
    """Write it, unless it is there."""
    if not (folder / "config.json").exists():
        write_tiny_model(folder, tokenizer_from=tokenizer_from, max_position=4096)
    return folder
