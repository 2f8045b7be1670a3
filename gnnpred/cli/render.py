"""What commands print with: a console, and numbers for people."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(*, min_width: int = 100) -> "Console":
    """Standard output; at least ``min_width`` columns where it is not a terminal, so that tables stay whole."""
    from rich.console import Console

    out = Console(highlight=False, markup=False, emoji=False)
    if not out.is_terminal:
        out.width = max(out.width, min_width)
    return out


def plain(text: str) -> str:
    """Text of a file, fit for a terminal: control characters become question marks."""
    return "".join(c if c.isprintable() else "?" for c in text)


def milliseconds(value_ms: float) -> str:
    """``0.0421 ms``, ``123.4 ms``, ``12.3 s``."""
    if value_ms >= 10_000:
        return f"{value_ms / 1e3:,.1f} s"
    return f"{value_ms:.4g} ms" if value_ms < 1000 else f"{value_ms:,.0f} ms"


def rate(value: float) -> str:
    """``20,250``, ``12.3``: three digits or all of them."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def scaled(value: float, units: tuple[str, ...] = ("", "k", "M", "G", "T", "P")) -> str:
    """``1.23 G``: three digits and a decimal prefix."""
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}".rstrip()
        value /= 1000
    return f"{value:.3g} {units[-1]}"


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
