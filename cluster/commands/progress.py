"""Progress of long work on standard error: a bar where someone watches, a line per stage where nobody does."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from pagoda.worker.weights import Progress


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A `Progress` to hand to whoever does the work."""
    bar: tqdm[None] | None = None
    shown = ""

    def progress(what: str, done: int, total: int) -> None:
        nonlocal bar, shown
        if what != shown:
            shown = what
            if bar is not None:
                bar.close()
                bar = None
            if total <= 1 or not sys.stderr.isatty():
                tqdm.write(what, file=sys.stderr)
            else:
                bar = tqdm(desc=what, total=total, leave=False, unit_scale=True, file=sys.stderr)
        if bar is not None:
            bar.update(done - bar.n)

    try:
        yield progress
    finally:
        if bar is not None:
            bar.close()
