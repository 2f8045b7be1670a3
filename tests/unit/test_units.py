"""Sizes as people write them."""

import pytest

from gnnpred.errors import UsageError
from gnnpred.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("100MB", 1e8), ("25MiB", 25 * 2**20), ("1e8", 1e8), ("64", 64), ("1.5 gb", 1.5e9), ("2KiB", 2048), ("8B", 8),
     ("1TB", 1e12), (".5MB", 5e5)],
)  # fmt: skip
def test_sizes_are_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "-5MB", "5XB", "five", "nan", "inf", "1e400", "0", "5M B", "1_000", "9e20"])
def test_what_is_no_size_is_refused_by_its_option(text):
    with pytest.raises(UsageError, match="--size"):
        parse_bytes(text, "--size")
