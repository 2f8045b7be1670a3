"""The progress bar of long commands, on standard error so that output stays clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The time left follows from the speed of this long: single items may take minutes, and rich's own 30 s forget them.
_SPEED_WINDOW_S = 3600.0


@contextmanager
def progress_bar(*, show: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """A function ``advance(what, done, total)``; one line per ``what``, with the time left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), disable=not show, speed_estimate_period=_SPEED_WINDOW_S)
    tasks: dict[str, object] = {}

    def advance(what: str, done: int, total: int) -> None:
        if not tasks:
            progress.start()  # not before: an error on the way must stay one line
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=total)
        progress.update(tasks[what], completed=done, total=total)

    try:
        yield advance
    finally:
        if tasks:
            progress.stop()
