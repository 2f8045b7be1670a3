"""Unit conversions. GB = 1e9 bytes, GiB = 2**30 bytes; 1 multiply-add = 2 flops."""

import re

from gnnpred.errors import UsageError

GB = 1e9
GIB = 2**30
TERA = 1e12
MS_PER_S = 1e3
US_PER_S = 1e6

_BYTES_PER_UNIT = {
    "": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
MAX_BYTES = 1e15


def parse_bytes(text: str, option: str = "--bytes") -> float:
    """``100MB`` -> 1e8, ``25MiB`` -> 26214400, ``1e8`` -> 1e8; raises UsageError that names the option."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+\.)\s*([a-zA-Z]*)\s*", text)
    unit = match and _BYTES_PER_UNIT.get(match[2].lower())
    if not match or not unit:
        raise UsageError(
            f"{option} {text!r} is no size: write a number with B, KB, MB, GB or KiB, MiB, GiB, as in 25MiB"
        )
    value = float(match[1]) * unit
    if not 0 < value <= MAX_BYTES:
        raise UsageError(f"{option} {text!r} must be above 0 and at most {MAX_BYTES / TERA:g} TB")
    return value
