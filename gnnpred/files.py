"""Writing files so that nothing half-written is ever left under the real name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_when_done(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; it takes the place of ``path`` at the end, and is removed after an error.

    The folder must exist.
    """
    # the process id keeps two writers of one file apart
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
