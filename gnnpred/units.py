"""Unit conversions. GB = 1e9 bytes, GiB = 2**30 bytes; 1 multiply-add = 2 flops."""

GB = 1e9
GIB = 2**30
TERA = 1e12
MS_PER_S = 1e3
US_PER_S = 1e6
