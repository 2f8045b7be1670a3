"""The progress bar of long commands, on standard error so that output stays clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable

# The time left follows from the speed of this long: single items may take minutes, and rich's own 30 s forget them.
_SPEED_WINDOW_S = 3600.0


@contextmanager
def progress_bar(
    *, show: bool = True, above: "ConsoleRenderable | None" = None, console: "Console | None" = None
) -> Iterator[Callable[[str, int, int], None]]:
    """A function ``advance(what, done, total)``; one line per ``what``, with the time left, below ``above``."""
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    class Display(Progress):
        def get_renderables(self) -> Iterator[RenderableType]:
            if above is not None:
                yield above
            yield from super().get_renderables()

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    progress = Display(
        *columns, console=console or Console(stderr=True), disable=not show, speed_estimate_period=_SPEED_WINDOW_S
    )
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
