"""What calibration measures of the native library: its forms, its names, and the fit of what surrounds products."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.calibration.native_rates import (
    NATIVE_CLASSES,
    NATIVE_ROWS,
    Memory,
    measure_native_bandwidth,
    measure_native_peak,
    measure_native_products,
    product_pass,
    read_bytes_per_s,
)
from twostroke.calibration.native_steps import Equation, least_squares_above_zero
from twostroke.calibration.timing import Clock
from twostroke.core.schemes import NATIVE_PRODUCTS
from twostroke.core.units import MIB
from twostroke.kernels.native_library import library, why_absent
from twostroke.kernels.native_matrix import FORMATS as LIBRARY_FORMATS
from twostroke.planner.serving.native_products import packed_bytes

needs_library = pytest.mark.skipif(library() is None, reason=why_absent())


@needs_library
@pytest.mark.parametrize("name", list(NATIVE_PRODUCTS))
@given(st.integers(1, 700), st.integers(1, 700))
def test_the_planners_packed_bytes_are_the_librarys(name: str, n: int, k: int) -> None:
    lib = library()
    assert lib is not None
    format, group = NATIVE_PRODUCTS[name]
    assert packed_bytes(name, n, k) == lib.ts_packed_bytes(LIBRARY_FORMATS[format], group, n, k)


@needs_library
def test_every_format_class_and_number_of_rows_has_a_rate() -> None:
    classes, rows = ((48, 64), (33, 100)), (1, 5)
    points = list(measure_native_products(Clock(effort=0.01), tuple(NATIVE_PRODUCTS), classes, rows))
    assert [(p.scheme, p.n, p.k, p.m) for p in points] == [
        (s, n, k, m) for s, (n, k), m in itertools.product(tuple(NATIVE_PRODUCTS), classes, rows)
    ]
    assert all(p.flop_per_s > 0 for p in points)


@needs_library
def test_slow_formats_are_measured_in_two_classes_of_the_whole_table() -> None:
    points = list(measure_native_products(Clock(effort=0.001), ("native_fp32",), NATIVE_CLASSES, (1,)))
    assert {(p.n, p.k) for p in points} == {(512, 512), (2048, 2048)}
    assert NATIVE_ROWS[0] == 1


@needs_library
def test_a_pass_walks_through_as_many_matrices_as_the_working_set_holds() -> None:
    lib = library()
    assert lib is not None
    memory = Memory(lib, MIB)
    times = [min(product_pass("native_int8", 1, 64, 64, memory, size)() for _ in range(20)) for size in (MIB, 64)]
    assert all(0 < seconds < 0.1 for seconds in times)  # of one matrix: one cycled, or two hundred


@needs_library
def test_bandwidth_and_peaks_are_positive() -> None:
    clock = Clock(effort=0.01)
    assert [p.working_set_bytes for p in measure_native_bandwidth(clock, (MIB, 8 * MIB))] == [MIB, 8 * MIB]
    assert 1e8 < (read_bytes_per_s(1e6, clock) or 0) < 1e13
    assert all((measure_native_peak(clock, scheme, 128) or 0) > 1e6 for scheme in tuple(NATIVE_PRODUCTS))


def test_without_the_library_there_are_no_native_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.calibration.native_rates.library", lambda: None)
    clock = Clock(effort=0.01)
    assert read_bytes_per_s(1e6) is None
    assert measure_native_peak(clock, "native_bf16", 128) is None
    assert list(measure_native_products(clock, tuple(NATIVE_PRODUCTS), ((64, 64),), (1,))) == []


@given(st.lists(st.floats(0, 5), min_size=3, max_size=3))
def test_prices_that_made_the_steps_are_found_again(prices: list[float]) -> None:
    names = ("a", "b", "c")
    counts = [(1.0, 2.0, 3.0), (1.0, 5.0, 1.0), (1.0, 0.0, 7.0), (2.0, 1.0, 1.0), (0.0, 3.0, 3.0)]
    units = [dict(zip(names, row, strict=True)) for row in counts]
    rests = [sum(u[n] * p for n, p in zip(names, prices, strict=True)) for u in units]
    found = least_squares_above_zero([Equation(1.0 + r, r, u) for r, u in zip(rests, units, strict=True)], names)
    assert found == pytest.approx(dict(zip(names, prices, strict=True)), abs=1e-6)


def test_no_price_is_negative_and_none_is_better() -> None:
    """The second unit would have to cost less than nothing: it costs nothing, and the first explains what it can."""
    equations = [
        Equation(10.0, 2.0, {"a": 1, "b": 1}),
        Equation(10.0, 3.0, {"a": 1, "b": 0}),
        Equation(10.0, 1.0, {"a": 1, "b": 2}),
    ]
    found = least_squares_above_zero(equations, ("a", "b"))
    assert found == pytest.approx({"a": 2.0, "b": 0.0})
    assert least_squares_above_zero([Equation(1.0, -1.0, {"a": 1})], ("a",)) == {"a": 0.0}
