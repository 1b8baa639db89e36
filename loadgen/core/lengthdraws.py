"""Draws of token counts and pauses from a distribution, by position and rounded: equal on all machines."""

from collections.abc import Callable

import numpy as np

from loadgen.core.lengths import DistributionShape, LengthDistribution
from tracefile.records.arrays import FloatArray, IntArray, UInt64Array


def quantities(lengths: LengthDistribution, bits: UInt64Array, units: int = 1) -> IntArray:
    """Integer quantity for each 64 random bits; ``units`` make 1 of the distribution (tokens: 1, seconds: 10⁶ µs)."""
    low, high = round(lengths.low * units), round(lengths.high * units)
    if lengths.shape == "uniform":
        if low == high:
            return np.full(bits.shape, low, dtype=np.int64)
        return low + _shares(bits >> np.uint64(32), high - low + 1)
    values = np.floor(DISTRIBUTIONS[lengths.shape](lengths, bits) * units + (lengths.shape != "zipf") * 0.5)
    return np.clip(values, low, high).astype(np.int64)


def _shares(bits: UInt64Array, most: int) -> IntArray:
    """``most`` times 32 random bits as a fraction, rounded down; in two halves, because hours in µs exceed 32 bits."""
    above, below = divmod(most, 1 << 32)
    return (bits * np.uint64(above) + (bits * np.uint64(below) >> np.uint64(32))).astype(np.int64)


def quantity(lengths: LengthDistribution, bits: int, units: int = 1) -> int:
    """Scalar form of ``quantities``: the same value for the same bits."""
    if lengths.low == lengths.high:
        return round(lengths.low * units)
    return int(quantities(lengths, np.array([bits], dtype=np.uint64), units)[0])


def uniform(bits: UInt64Array) -> FloatArray:
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / float(1 << 53)


def standard_normal(bits: UInt64Array) -> FloatArray:
    """Standard normal draws (Box and Muller)."""
    half = float(1 << 32)
    radius = np.sqrt(-2.0 * np.log(((bits >> np.uint64(32)).astype(np.float64) + 0.5) / half))
    angle = (bits & np.uint64((1 << 32) - 1)).astype(np.float64) * (2.0 * np.pi / half)
    values: FloatArray = radius * np.cos(angle)
    return values


def _normal(lengths: LengthDistribution, bits: UInt64Array) -> FloatArray:
    return lengths.mean + lengths.sd * standard_normal(bits)


def _lognormal(lengths: LengthDistribution, bits: UInt64Array) -> FloatArray:
    variance = np.log1p((lengths.sd / lengths.mean) ** 2)
    values: FloatArray = np.exp(np.log(lengths.mean) - variance / 2 + np.sqrt(variance) * standard_normal(bits))
    return values


def _zipf(lengths: LengthDistribution, bits: UInt64Array) -> FloatArray:
    """Power law over [low, high + 1), by its inverse distribution function."""
    low, high, uniforms = lengths.low, lengths.high + 1, uniform(bits)
    power = 1.0 - lengths.exponent
    if power == 0:
        values: FloatArray = low * np.power(high / low, uniforms)
    else:
        values = np.power(low**power + uniforms * (high**power - low**power), 1.0 / power)
    return values


DISTRIBUTIONS: dict[DistributionShape, Callable[[LengthDistribution, UInt64Array], FloatArray]] = {
    "normal": _normal,
    "lognormal": _lognormal,
    "zipf": _zipf,
}
