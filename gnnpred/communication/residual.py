"""What measured collectives take beyond the alpha-beta formula: a log factor, linear in a few basis functions.

Piecewise-linear curves over the logarithm of the size, one per fabric and collective, and one more that grows with
the number of ranks; small terms for int8 reductions and for the NCCL version. All are shrunk towards zero (ridge). A
fabric that nobody measured gets physics alone: curves shared by a family of links were tried and made unseen
fabrics worse (docs/communication.md). The same :func:`terms` serve the fit and the prediction.
"""

from math import log2

SIZE_KNOTS = tuple(range(8, 35, 2))  # log2 of bytes
COARSE_SIZE_KNOTS = tuple(range(8, 37, 4))
REGIME_LIMITS = (-8.0, 10.0)  # log2 of transfer time / latency
LINEAR_TERMS = 2  # offset, slope over the regime
REFERENCE_RANKS = 8
REFERENCE_NCCL_MINOR = 27
OLDEST_NCCL_MINOR = 20
MAX_LOG_FACTOR = 1.0  # a correction beyond e would be another machine

Term = tuple[str, int, float]  # block, position in the block, value


def hat_weights(value: float, knots: tuple[int, ...]) -> list[tuple[int, float]]:
    """Positions and weights of linear interpolation between knots; the ends hold."""
    if value <= knots[0]:
        return [(0, 1.0)]
    if value >= knots[-1]:
        return [(len(knots) - 1, 1.0)]
    step = knots[1] - knots[0]
    index = int((value - knots[0]) // step)
    share = (value - knots[index]) / step
    return [(index, 1 - share), (index + 1, share)]


def nccl_minor(version: str) -> int | None:
    """``2.27.3`` -> 27; None where the text is no NCCL 2 version."""
    parts = version.strip().split(".")
    return int(parts[1]) if len(parts) > 1 and parts[0] == "2" and parts[1].isdigit() else None


def terms(
    *,
    kind: str,
    fabric: str,
    is_switched: bool,
    num_bytes: float,
    regime: float,
    ranks: int,
    dtype: str,
    nccl_version: str,
) -> list[Term]:
    """The basis functions of one collective that are not zero; ``regime`` is log2 of transfer time / latency."""
    size = log2(max(num_bytes, 1.0))
    regime = min(max(regime, REGIME_LIMITS[0]), REGIME_LIMITS[1])
    over_ranks = min(max(log2(ranks / REFERENCE_RANKS), -2.0), 3.0)
    found: list[Term] = []
    found += [(f"fabric {fabric} {kind}", i, w) for i, w in hat_weights(size, SIZE_KNOTS)]
    if is_switched:  # in a mesh the links of a group, not its size, decide
        found += [(f"ranks {fabric} {kind}", i, w * over_ranks) for i, w in hat_weights(size, COARSE_SIZE_KNOTS)]
    slope = regime / REGIME_LIMITS[1]
    if dtype == "int8":
        found += [(f"int8 {kind}", 0, 1.0), (f"int8 {kind}", 1, slope)]
    minor = nccl_minor(nccl_version)
    if minor is not None and minor >= OLDEST_NCCL_MINOR:  # the few older rows stand for their machines, not for NCCL
        newer = min((minor - REFERENCE_NCCL_MINOR) / 5, 1.0)
        found += [(f"nccl {fabric} {kind}", 0, newer), (f"nccl {fabric} {kind}", 1, newer * slope)]
    return found


def block_length(block: str) -> int:
    """Number of coefficients of a block."""
    what = block.split()[0]
    if what == "fabric":
        return len(SIZE_KNOTS)
    if what in ("int8", "nccl"):
        return LINEAR_TERMS
    return len(COARSE_SIZE_KNOTS)


def log_factor(coefficients: dict[str, list[float]], found: list[Term]) -> float:
    """log(time / alpha-beta time)."""
    total = sum(coefficients[block][position] * value for block, position, value in found if block in coefficients)
    return min(max(total, -MAX_LOG_FACTOR), MAX_LOG_FACTOR)
