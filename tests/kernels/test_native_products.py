"""The native products against numpy in double precision, on every target that holds here, with guarded buffers."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from twostroke.kernels import native_library
from twostroke.kernels.native import build as native_build

library = native_library.library()
if library is None:
    pytest.skip(native_library.why_absent(), allow_module_level=True)

F32, BF16, W8A8, INT8, INT4, INT8_GROUPS, INT4_BLOCKS = range(7)
NAMES = ("f32", "bf16", "w8a8", "int8", "int4", "int8_groups", "int4_blocks")
FORMATS = [
    (F32, 0), (BF16, 0), (W8A8, 0), (INT8, 0), (INT4, 32), (INT4, 64), (INT4, 128), (INT8_GROUPS, 16), (INT8_GROUPS, 32),
    (INT4_BLOCKS, 256),
]  # fmt: skip
CODED = [(format, group) for format, group in FORMATS if format not in (F32, BF16, INT8)]
by_format = pytest.mark.parametrize(("format", "group"), FORMATS, ids=[f"{NAMES[f]}{g or ''}" for f, g in FORMATS])
by_target = pytest.mark.parametrize("target", native_library.holding())

GUARD_PAGES = "TWOSTROKE_TESTS_WITHOUT_GUARD_PAGES" not in os.environ
_libc = ctypes.CDLL(None)
_guarded: list[mmap.mmap] = []


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy whose last byte is the last before a page that nobody may touch, unless ``GUARD_PAGES`` is off."""
    page = mmap.PAGESIZE
    size = -(-max(array.nbytes, 1) // page) * page
    area = mmap.mmap(-1, size + page)
    _guarded.append(area)  # pages live as long as the module: arrays point into them
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    if GUARD_PAGES:
        assert _libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(page), 0) == 0
    copy = np.frombuffer(area, dtype=array.dtype, count=array.size, offset=size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.fixture(autouse=True)
def _best_target_and_two_threads_again() -> Iterator[None]:
    yield
    use(native_library.holding()[-1])
    library.ts_set_threads(2)


def use(target: str) -> None:
    native_library.set_target(target, library)
    assert native_library.target(library) == target


def pointer(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def eleven_bits(scales: np.ndarray) -> np.ndarray:
    """What fp16's mantissa holds."""
    mantissa, exponent = np.frexp(scales)
    return np.ldexp(np.rint(mantissa * 2048) / 2048, exponent).astype(np.float32)


@dataclass
class Weights:
    format: int
    group: int
    n: int
    k: int
    packed: np.ndarray
    meaning: np.ndarray
    """What it stands for, fp64."""
    codes: np.ndarray
    scales: np.ndarray | None

    @staticmethod
    def random(format: int, group: int, n: int, k: int, rng: np.random.Generator) -> Weights:
        scales: np.ndarray | None = None
        zeros: np.ndarray | None = None
        if format == F32:
            codes = rng.standard_normal((n, k), dtype=np.float32)
            meaning = codes.astype(np.float64)
        elif format == BF16:
            codes = to_bf16(rng.standard_normal((n, k), dtype=np.float32))
            meaning = from_bf16(codes).astype(np.float64)
        elif format in (W8A8, INT8):
            codes = rng.integers(-127, 128, (n, k)).astype(np.int8)
            scales = rng.uniform(1e-3, 1, n).astype(np.float32)
            meaning = codes.astype(np.float64) * scales[:, None]
        elif format == INT8_GROUPS:
            codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
            scales = eleven_bits(rng.uniform(1e-3, 1, (n, -(-k // group))) * rng.choice([-1, 1], (n, -(-k // group))))
            meaning = codes * np.repeat(scales.astype(np.float64), group, axis=1)[:, :k]
        elif format == INT4_BLOCKS:
            codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
            scales = rng.uniform(-1, 1, (n, -(-k // group), 2)).astype(np.float16).astype(np.float32)
            zeros = rng.integers(0, 64, (n, -(-k // 32), 2)).astype(np.uint8)
            both = np.repeat(scales.astype(np.float64), group // 32, axis=1)[:, : zeros.shape[1]] * zeros
            both = np.repeat(both, 32, axis=1)[:, :k]
            meaning = codes * both[..., 0] - both[..., 1]
        else:
            codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
            zeros = rng.integers(0, 16, (n, -(-k // group))).astype(np.uint8)
            scales = eleven_bits(rng.uniform(1e-3, 1, zeros.shape))
            spread = [np.repeat(values.astype(np.float64), group, axis=1)[:, :k] for values in (zeros, scales)]
            meaning = (codes - spread[0]) * spread[1]
        codes, scales, zeros = (None if a is None else guarded(a) for a in (codes, scales, zeros))
        packed = guarded(np.full(library.ts_packed_bytes(format, group, n, k), 0xAB, np.uint8))
        library.ts_pack(format, group, n, k, pointer(codes), pointer(scales), pointer(zeros), pointer(packed))
        return Weights(format, group, n, k, packed, meaning, codes, scales)


@dataclass
class PreparedRows:
    m: int
    f32: np.ndarray
    bf16: np.ndarray | None = None
    codes: np.ndarray | None = None
    scales: np.ndarray | None = None
    sums: np.ndarray | None = None

    @staticmethod
    def of(format: int, x: np.ndarray) -> PreparedRows:
        m, k = x.shape
        rows = PreparedRows(m, guarded(x.astype(np.float32)))
        if format == BF16:
            rows.bf16 = guarded(np.full((m, library.ts_padded(k)), 7, np.uint16))
        elif format not in (F32, INT8):
            rows.codes = guarded(np.full((m, library.ts_padded(k)), 7, np.int8))
            rows.scales = guarded(np.full(m, 7, np.float32))
            rows.sums = guarded(np.full((m, library.ts_sums_per_row(k)), 7, np.int32))
        library.ts_prepare_rows(format, pointer(rows.f32), m, k, *rows.pointers()[1:])
        return rows

    def pointers(self) -> list[int | None]:
        return [pointer(a) for a in (self.f32, self.bf16, self.codes, self.scales, self.sums)]

    def meaning(self, k: int) -> np.ndarray:
        if self.bf16 is not None:
            return from_bf16(self.bf16)[:, :k].astype(np.float64)
        if self.codes is not None and self.scales is not None:
            return self.codes[:, :k].astype(np.float64) * self.scales[:, None]
        return self.f32.astype(np.float64)

    def slice(self, first: int, last: int) -> PreparedRows:
        parts = [None if a is None else a[first:last] for a in (self.f32, self.bf16, self.codes, self.scales, self.sums)]
        return PreparedRows(last - first, *parts)


CANARY = np.float32(-12345.0)


def product(
    w: Weights,
    rows: PreparedRows,
    bias: np.ndarray | None = None,
    start: np.ndarray | None = None,
    n_range: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """y (m, n), written with a row stride of n + 3 between canaries; ``start``: what y holds before, to be added to."""
    m, n = rows.m, w.n
    y = guarded(np.full(m * (n + 3) - 3, CANARY, np.float32))
    view = np.lib.stride_tricks.as_strided(y, (m, n), (4 * (n + 3), 4))
    if start is not None:
        view[...] = start
    shape = (w.format, w.group, n, w.k, pointer(w.packed), pointer(bias), m, *rows.pointers())
    if n_range == (0, 0):
        library.ts_product(*shape, pointer(y), n + 3, start is not None)
        between = np.lib.stride_tricks.as_strided(y[n:], (max(m - 1, 0), 3), (4 * (n + 3), 4))
        assert (between == CANARY).all(), "something was written between the rows of y"
    else:
        library.ts_product_range(*shape, *n_range, pointer(y), n + 3, start is not None)
        assert (view[:, : n_range[0]] == CANARY).all()
        assert (view[:, n_range[1] :] == CANARY).all()
    return view.copy()


def tolerance(k: int) -> float:
    """fp32 sums of k terms in another order: some 2⁻²⁴ of the largest for each of √k steps of a random walk."""
    return 4e-7 * max(1.0, k**0.5)


@by_target
@by_format
def test_product_over_odd_shapes(target: str, format: int, group: int) -> None:
    use(target)
    rng = np.random.default_rng([*target.encode(), format, group])
    for case in range(24):
        n, k, m = (
            int(rng.integers(1, 150)),
            int(rng.integers(1, 260)),
            int(rng.integers(1, 71) if case % 2 else rng.integers(1, 6)),
        )
        w = Weights.random(format, group, n, k, rng)
        rows = PreparedRows.of(format, rng.standard_normal((m, k), dtype=np.float32))
        bias = guarded(rng.standard_normal(n, dtype=np.float32)) if case % 3 == 0 else None
        start = rng.standard_normal((m, n), dtype=np.float32) if case % 4 == 0 else None
        expected = rows.meaning(k) @ w.meaning.T + (0 if bias is None else bias) + (0 if start is None else start)
        error = np.abs(product(w, rows, bias, start) - expected).max() / max(1e-6, np.abs(expected).max())
        assert error <= tolerance(k), (n, k, m)


@by_target
def test_w8a8_is_exact_to_the_last_bit(target: str) -> None:
    use(target)
    rng = np.random.default_rng([*target.encode()])
    for n, k, m in ((17, 33, 1), (64, 576, 5), (33, 1000, 13), (16, 9000, 2)):
        w, x = Weights.random(W8A8, 0, n, k, rng), rng.standard_normal((m, k), dtype=np.float32)
        w.codes[0, :] = 127  # the largest sums there are: what saturates at 16 bits shows here
        x[0, :] = 3.0
        library.ts_pack(W8A8, 0, n, k, pointer(w.codes), pointer(w.scales), None, pointer(w.packed))
        rows = PreparedRows.of(W8A8, x)
        bias, start = rng.standard_normal(n, dtype=np.float32), rng.standard_normal((m, n), dtype=np.float32)
        assert rows.codes is not None
        assert rows.scales is not None
        assert w.scales is not None
        sums = rows.codes[:, :k].astype(np.int64) @ w.codes.astype(np.int64).T
        expected = start + (sums.astype(np.float32) * rows.scales[:, None] * w.scales + bias)
        assert np.array_equal(product(w, rows, bias, start), expected)


@pytest.mark.parametrize(("format", "group"), CODED)
def test_integer_formats_have_the_same_bits_on_every_target(format: int, group: int) -> None:
    rng = np.random.default_rng(3)
    w = Weights.random(format, group, 70, 450, rng)
    x = rng.standard_normal((9, 450), dtype=np.float32)
    found = []
    for target in native_library.holding():
        use(target)
        found.append(product(w, PreparedRows.of(format, x)))
    assert all(np.array_equal(found[0], other) for other in found[1:])


@by_target
@by_format
def test_a_row_does_not_depend_on_its_neighbours_nor_on_who_computes_it(target: str, format: int, group: int) -> None:
    use(target)
    rng = np.random.default_rng([*target.encode()])
    n, k, m = 150, 300, 61
    w = Weights.random(format, group, n, k, rng)
    rows = PreparedRows.of(format, rng.standard_normal((m, k), dtype=np.float32))
    whole = product(w, rows)
    for first, last in ((0, 1), (60, 61), (3, 5), (7, 20), (0, 33)):
        assert np.array_equal(product(w, rows.slice(first, last)), whole[first:last])
    for n0, n1 in ((0, 16), (16, 112), (112, 150), (144, 150)):
        assert np.array_equal(product(w, rows, n_range=(n0, n1))[:, n0:n1], whole[:, n0:n1])
    for n_threads in (1, 3):
        library.ts_set_threads(n_threads)
        assert np.array_equal(product(w, rows), whole)


@by_target
@pytest.mark.parametrize(("format", "group"), [(BF16, 0), *CODED])
def test_many_rows_with_many_inputs_are_each_the_same_as_alone(target: str, format: int, group: int) -> None:
    """Inputs are walked in parts and blocks of rows overlap where there are many of both: 1 to 4 rows know neither."""
    use(target)
    rng = np.random.default_rng([*target.encode()])
    for n, k, m in ((40, 1440, 45), (33, 700, 130), (16, 672, 530)):
        w = Weights.random(format, group, n, k, rng)
        rows = PreparedRows.of(format, rng.standard_normal((m, k), dtype=np.float32))
        start = rng.standard_normal((m, n), dtype=np.float32)
        whole = product(w, rows, start=start)
        for first, last in ((0, 1), (31, 33), (m // 2, m // 2 + 4), (m - 1, m)):
            assert np.array_equal(product(w, rows.slice(first, last), start=start[first:last]), whole[first:last])


@by_target
@pytest.mark.parametrize("exponents", [(100, 155), (0, 30), (50, 70), (180, 250), (0, 255)])
def test_bf16_of_few_rows_has_the_bits_of_many(target: str, exponents: tuple[int, int]) -> None:
    """Values across bf16's range, among them denormals, overflow and, in the last, sums of infinities."""
    use(target)
    rng = np.random.default_rng([*target.encode()])
    n, k, m = 50, 224, 37
    w, x = (
        (rng.integers(0, 2, shape) << 15 | rng.integers(*exponents, shape) << 7 | rng.integers(0, 128, shape)).astype(np.uint16)
        for shape in ((n, k), (m, k))
    )
    packed = Weights.random(BF16, 0, n, k, rng)
    library.ts_pack(BF16, 0, n, k, pointer(w), None, None, pointer(packed.packed))
    rows = PreparedRows(m, from_bf16(x), guarded(x))
    whole = product(packed, rows)
    for first in range(m):
        few = product(packed, rows.slice(first, min(m, first + 1 + first % 4)))
        assert np.array_equal(few, whole[first : first + len(few)], equal_nan=True)


@by_target
def test_outputs_too_many_for_the_caches_are_the_same(target: str) -> None:
    use(target)
    rng = np.random.default_rng([*target.encode()])
    n, m, k = 4096, 520, 64
    w = Weights.random(W8A8, 0, n, k, rng)
    rows = PreparedRows.of(W8A8, rng.standard_normal((m, k), dtype=np.float32))
    y = np.full(m * n + 16, CANARY, np.float32)
    aligned = y[-y.ctypes.data % 64 // 4 :][: m * n]
    library.ts_product(W8A8, 0, n, k, pointer(w.packed), None, m, *rows.pointers(), pointer(aligned), n, False)
    assert np.array_equal(aligned.reshape(m, n), product(w, rows))  # there, with n + 3 between rows, lines are not whole


@by_target
def test_rows_are_rounded_to_nearest_even(target: str) -> None:
    use(target)
    rng = np.random.default_rng([*target.encode()])
    for k in (1, 7, 16, 31, 32, 33, 100, 576, 1537):
        x = (rng.standard_normal((5, k)) * 10.0 ** rng.integers(-6, 6, (5, 1))).astype(np.float32)
        x[1] = 0
        x[2] = np.where(np.arange(k) % 2, 0.5, -1.5)  # ties, for the scale of the next line
        x[2, 0] = 127
        x[3, :] = 1e-38  # a scale that must not make 127/max infinite
        rows = PreparedRows.of(W8A8, x)
        assert rows.codes is not None
        assert rows.sums is not None
        largest = np.maximum(np.abs(x).max(axis=1), np.float32(1e-30))
        assert np.array_equal(rows.scales, largest / np.float32(127))
        assert np.array_equal(rows.codes[:, :k], np.rint(x * (np.float32(127) / largest)[:, None]))
        assert (rows.codes[:, k:] == 0).all()
        wide = rows.codes.astype(np.int32)
        assert np.array_equal(rows.sums[:, 0], wide.sum(axis=1))
        assert np.array_equal(rows.sums[:, 1:], wide.reshape(5, -1, 32).sum(axis=2))
        rounded = PreparedRows.of(BF16, x).bf16
        assert rounded is not None
        assert np.array_equal(rounded[:, :k], to_bf16(x))
        assert (rounded[:, k:] == 0).all()


@by_target
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@by_format
def test_what_is_not_finite_stays_so(target: str, bad: float, format: int, group: int) -> None:
    use(target)
    rng = np.random.default_rng(0)
    for position in (0, 5, 18, 39):
        x = rng.standard_normal((2, 40), dtype=np.float32)
        x[1, position] = bad
        y = product(Weights.random(format, group, 20, 40, rng), PreparedRows.of(format, x))
        assert np.isfinite(y[0]).all()
        assert not np.isfinite(y[1]).any()


def test_int8_and_w8a8_read_the_same_copy() -> None:
    rng = np.random.default_rng(0)
    w, x = Weights.random(W8A8, 0, 40, 100, rng), rng.standard_normal((3, 100), dtype=np.float32)
    same = Weights(INT8, 0, 40, 100, w.packed, w.meaning, w.codes, w.scales)
    found = product(same, PreparedRows.of(INT8, x))
    assert np.allclose(found, x @ w.meaning.T, rtol=0, atol=tolerance(100) * np.abs(found).max())


def test_int4_without_zero_points_is_symmetric() -> None:
    rng = np.random.default_rng(0)
    w = Weights.random(INT4, 32, 16, 64, rng)
    library.ts_pack(INT4, 32, 16, 64, pointer(w.codes), pointer(w.scales), None, pointer(w.packed))
    assert w.scales is not None
    rows = PreparedRows.of(INT4, rng.standard_normal((2, 64), dtype=np.float32))
    expected = rows.meaning(64) @ ((w.codes.astype(np.float64) - 8) * np.repeat(w.scales, 32, axis=1)).T
    assert np.allclose(product(w, rows), expected, rtol=0, atol=tolerance(64) * np.abs(expected).max())


@pytest.fixture(scope="module")
def emulated_tiles(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library with AMX's tiles in plain C++: all of the code above the eight instructions runs without them."""
    if "avx512_bf16" not in native_library.features():
        pytest.skip("the code around the tiles needs AVX-512-BF16")
    try:
        path = native_build.build(
            tmp_path_factory.mktemp("emulated") / "_native.so",
            dict.fromkeys(("kernels_amx", "attention_amx"), ("-DTS_EMULATE_AMX",)),
        )
    except native_build.BuildError as error:
        pytest.skip(str(error))
    return native_library.open_library(path)


def test_tiles_of_amx_agree(emulated_tiles: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    amx = "amx"
    assert native_library.target(emulated_tiles) == amx  # its own check, against AVX-512, was passed
    monkeypatch.setitem(globals(), "library", emulated_tiles)
    for format, group in ((BF16, 0), (W8A8, 0), (INT4, 32), (INT4, 64), (INT4, 128)):
        test_product_over_odd_shapes(amx, format, group)
        test_a_row_does_not_depend_on_its_neighbours_nor_on_who_computes_it(amx, format, group)
        test_what_is_not_finite_stays_so(amx, np.nan, format, group)
        test_many_rows_with_many_inputs_are_each_the_same_as_alone(amx, format, group)
    test_w8a8_is_exact_to_the_last_bit(amx)
    test_bf16_of_few_rows_has_the_bits_of_many(amx, (100, 155))
