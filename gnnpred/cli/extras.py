"""Optional dependencies: one clear line where an extra is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from gnnpred.errors import UsageError


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn a missing third-party module into the line that says which extra brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or error.name.split(".")[0] == "gnnpred":
            raise
        raise UsageError(
            f"this command needs {error.name}, which the core install leaves out: pip install 'gnnpred[{extra}]'"
        ) from error
