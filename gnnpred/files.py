"""Files: nothing half-written under the real name, small tables read within bounds, digests of plain values."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gnnpred.errors import GnnpredError

MAX_TABLE_BYTES = 1 << 20


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


def read_table(path: Path, what: str, *, too_large: str = "", only_toml: bool = False) -> Any:
    """Content of a user's small TOML file, or (not ``only_toml``) of a JSON file by its suffix, read within
    ``MAX_TABLE_BYTES``.

    ``what`` names the kind of file ("device file"), ``too_large`` ends the line on one that is too large. Raises
    GnnpredError.
    """
    import json
    import tomllib

    try:
        with path.open("rb") as file:  # read no more than the limit, whatever the size claims (pipes, /dev/zero)
            content = file.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise GnnpredError(f"cannot read {what} {path}: {error.strerror or error}") from error
    if len(content) > MAX_TABLE_BYTES:
        raise GnnpredError(f"{what} {path} is larger than {MAX_TABLE_BYTES >> 20} MiB{too_large}")
    kind = "JSON" if path.suffix.lower() == ".json" and not only_toml else "TOML"
    try:
        text = content.decode("utf-8")
        return json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise GnnpredError(f"{what} {path} is not text (UTF-8)") from error
    except (ValueError, RecursionError) as error:
        raise GnnpredError(f"{what} {path} is not valid {kind}: {str(error).splitlines()[0]}") from error


def require_known(
    names: Iterable[str], known: Iterable[str], where: str, *, what: str = "field", listed: str = "fields are"
) -> None:
    """Raises GnnpredError for the first name that is not known, with the nearest one or, after ``listed``, all."""
    import difflib

    known = tuple(known)
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f", did you mean {nearest[0]!r}?" if nearest else f": {listed} {', '.join(known)}"
            raise GnnpredError(f"{where}: unknown {what} {name!r}{hint}")


def json_digest(content: Any, length: int = 16) -> str:
    """First hexadecimal digits of the SHA-256 of plain values, whatever the order of their keys."""
    import hashlib
    import json

    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:length]
