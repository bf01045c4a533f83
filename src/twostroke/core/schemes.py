"""Every way to hold weights: one row a scheme. Planner, engines, kernels, calibration, files and help texts read this table.

A name may mean two things. On accelerators ``int4`` is what AWQ and GPTQ publish; our engine, where no group is named, holds
it in groups of 64. A row says so with ``own``: the name of the row that it stands for wherever we write or run it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostroke.core.dtypes import bytes_of
from twostroke.core.errors import ConfigError

GROUPS = (32, 64, 128)
"""Inputs that may share a scale in the native library's 4-bit format."""

INT8_GROUPS = (16, 32)
"""The same in its 8-bit one."""

BLOCK, BLOCK_GROUP = 256, 32
"""Inputs of a block whose groups have codes for scales and minima, and of such a group."""

W8, W8A8 = "w8", "w8a8"
"""Torch's products of int8 weights as profiles name them: with bf16 activations, and with activations rounded on the way."""

ADAPTER_CODES = "int8"
"""The type of the codes in which the native library holds adapters."""


@dataclass(frozen=True)
class NativeFormat:
    """How the native library packs a matrix: the type of a weight, ``groups`` of inputs that may share what takes
    ``group_bytes`` an output, ``inner_bytes`` that each ``BLOCK_GROUP`` inputs take beside, ``output_bytes`` that an output
    does, whether its products have a matrix unit, without which large ones take long, and whether they round activations to
    8 bits, a scale a row."""

    element: str
    groups: tuple[int, ...] = ()
    group_bytes: int = 0
    output_bytes: int = 0
    inner_bytes: int = 0
    matrix_unit: bool = True
    rounds_inputs: bool = False

    @property
    def grouped(self) -> bool:
        return bool(self.groups)

    @property
    def coded(self) -> bool:
        """Whether weights are codes with scales."""
        return self.element.startswith("int")


NATIVE_FORMATS: dict[str, NativeFormat] = {
    "fp32": NativeFormat("fp32", matrix_unit=False),
    "bf16": NativeFormat("bf16"),
    "int8": NativeFormat("int8", output_bytes=4, rounds_inputs=True),  # W8A8
    "int8_weight_only": NativeFormat("int8", output_bytes=4, matrix_unit=False),
    "int4": NativeFormat("int4", GROUPS, 3, 4, matrix_unit=False, rounds_inputs=True),  # W4A8
    "int8_groups": NativeFormat("int8", INT8_GROUPS, 2, 4, matrix_unit=False, rounds_inputs=True),
    "int4_blocks": NativeFormat("int4", (BLOCK,), 4, inner_bytes=2, matrix_unit=False, rounds_inputs=True),
}
"""In the order of the library's numbers (``ts::Format``)."""


def native_product_name(native: str, group: int = 0) -> str:
    """``native_int4_g64`` of ("int4", 64), ``native_bf16`` of ("bf16", 0): names of rates in a machine profile."""
    return f"native_{native}_g{group}" if group else f"native_{native}"


@dataclass(frozen=True)
class DiskLayout:
    """compressed-tensors' ``format``, the kind of its numbers, the type of activations that it asks engines for (None: they are
    left alone), and safetensors' tag of its codes. Channels have symmetric codes, groups a zero point."""

    format: str
    numbers: str
    activations: str | None
    tag: str


INT_QUANTIZED = DiskLayout("int-quantized", "int", "int", "I8")
PACK_QUANTIZED = DiskLayout("pack-quantized", "int", None, "I32")
"""Eight codes a 32-bit word."""
FLOAT_QUANTIZED = DiskLayout("float-quantized", "float", "float", "F8_E4M3")


@dataclass(frozen=True)
class Scheme:
    """How weights are held.

    ``element`` is the type of one weight of a quantised matrix, with ``scale_bytes`` (scale and zero point) for every block of
    ``block_rows`` outputs × ``group`` inputs (None: all of them), the last of a row or column being smaller. ``experts_only``:
    in a mixture of experts nothing but the experts' matrices is quantised.

    On accelerators: ``activations`` is the type that products need them in, ``products`` the types of arithmetic from the best
    to the least, ``published`` the ``quant_method`` of checkpoints that come so (of NVIDIA's Model Optimizer the
    ``quant_algo``). ``planned`` says whether datasheet devices can be planned with it, ``searched`` whether a search tries it
    unasked.

    In our engine: ``native`` is the library's format ("": it has none), ``torch`` the products of the torch runner for few rows
    and for many. Calibration measures whole native steps where it is ``stepped``. ``beside`` names the scheme that a
    directory may hold single matrices in instead. ``disk`` is its layout, ``own`` the row that it stands for in the engine.
    ``computed_from`` names the row in which a directory is written that the engine holds so if it is asked to. Weights are
    never rounded to a row that is ``only_read``: files come so.
    ``label`` is what a comparison's table calls it, where that is not its name.

    A GGUF file quantises the embedding as well, and the output head in a type of its own, the row ``head`` (None: both stay in
    ``kept``). ``mix`` holds (part of a matrix, row, share of layers) for parts that some layers hold in another row.
    """

    name: str
    element: str
    scale_bytes: float = 0.0
    block_rows: int = 1
    group: int | None = None
    experts_only: bool = False
    activations: str = "bf16"
    products: tuple[str, ...] = ("bf16",)
    published: tuple[str, ...] = ()
    planned: bool = True
    searched: bool = False
    native: str = ""
    torch: tuple[str, ...] = ()
    stepped: bool = False
    beside: str | None = None
    disk: DiskLayout | None = None
    own: str | None = None
    computed_from: str | None = None
    label: str = ""
    only_read: bool = False
    head: str | None = None
    mix: tuple[tuple[str, str, float], ...] = ()

    @property
    def element_bytes(self) -> float:
        return bytes_of(self.element)

    @property
    def quantised(self) -> bool:
        return self.scale_bytes > 0

    @property
    def has_zeros(self) -> bool:
        """Whether its codes have zero points or minima beside their scales."""
        return self.element == "int4"

    @property
    def kept(self) -> str:
        """The type of what is not quantised (embedding, head, norms), of activations and, unless asked otherwise, the cache."""
        return "fp32" if self.element == "fp32" else "bf16"

    @property
    def kept_bytes(self) -> float:
        return bytes_of(self.kept)

    @property
    def family(self) -> str:
        """The name without its group: what the engine calls it."""
        return self.name.partition("-")[0]

    @property
    def here(self) -> Scheme:
        """The row that our engine and our files mean by this name."""
        return self if self.own is None else SCHEMES[self.own]

    @property
    def computes_in_codes(self) -> bool:
        """Whether the native library multiplies the codes themselves; else they are expanded once, at loading."""
        return self.quantised and self.native != "" and NATIVE_FORMATS[self.native].coded

    @property
    def rounds_inputs(self) -> bool:
        """Whether the native library rounds what is multiplied with the codes to 8 bits, a scale a row."""
        return self.computes_in_codes and NATIVE_FORMATS[self.native].rounds_inputs

    def adapter_element(self, native: bool) -> str:
        """What an adapter beside weights of this scheme is held in: by the native library in codes with a scale a rank, beside
        fp32 in fp32; by torch in the type of activations."""
        return ADAPTER_CODES if native and self.kept != "fp32" else self.kept

    def multiplied(self, runner: str) -> str:
        """What products of the "native" or the "torch" runner multiply: the codes, by their own name, or the plain type that
        they are expanded to at loading."""
        in_codes = self.computes_in_codes if runner == "native" else W8A8 in self.torch
        if not self.quantised or in_codes:
            return self.name
        return self.native if runner == "native" else self.kept

    @property
    def native_product(self) -> str:
        """The product of the native library as profiles name its rates: native_int4_g64, native_bf16."""
        return native_product_name(self.here.native, self.here.group or 0)

    def scales(self, n: int, k: int) -> int:
        """Blocks of an (n, k) matrix."""
        return math.ceil(n / self.block_rows) * (math.ceil(k / self.group) if self.group else 1)

    def matrix_bytes(self, n: int, k: int) -> float:
        """Bytes of an (n, k) matrix with its scales."""
        return self.element_bytes * (n * k) + self.scale_bytes * self.scales(n, k)

    def part_bytes(self, part: str, n: int, k: int) -> float:
        """The same of a part of the blocks' matrices by its name, over all layers on average."""
        share = sum(of for name, _, of in self.mix if name == part)
        others = sum(of * SCHEMES[row].matrix_bytes(n, k) for name, row, of in self.mix if name == part)
        return (1 - share) * self.matrix_bytes(n, k) + others


def _fours(group: int) -> Scheme:
    """Ours, as `twostroke quantize` writes it: a group has an fp32 scale and a 4-bit zero point."""
    return Scheme(
        f"int4-g{group}", "int4", 4.5, group=group,
        planned=False, native="int4", torch=("packed_bf16",), beside="int8", disk=PACK_QUANTIZED,
    )  # fmt: skip


def _eights(group: int) -> Scheme:
    """What GGUF's types without minima are computed as: a group has an fp16 scale."""
    return Scheme(f"int8-g{group}", "int8", 2.0, group=group, planned=False, native="int8_groups", torch=("packed_bf16",))


def _gguf(
    name: str, element: str, scale_bytes: float, group: int, head: str = "Q6_K", mix: tuple[tuple[str, str, float], ...] = ()
) -> Scheme:
    """llama.cpp's, by ggml's block (ggml-common.h): ``group`` weights with ``scale_bytes`` beside their codes. The head is in
    Q6_K, in the same type where that is wider (llama.cpp, ``llama_tensor_get_type``)."""
    return Scheme(name, element, scale_bytes, group=group, activations="fp16", head=head, mix=mix)


_HALF_WIDER = (("v", "Q6_K", 0.5), ("down", "Q6_K", 0.5))
"""``use_more_bits``: of a file type _M the first and last eighth of layers and every third between hold values and the way
down in Q6_K, which is half of them. What llama.cpp does apart for 70B's values and experts' keys, 0.1% of the bytes, is not."""


_ROWS = (
    Scheme(
        "fp32", "fp32", activations="fp32", products=("fp32",),
        native="fp32", torch=("packed_fp32",),
    ),
    Scheme("bf16", "bf16", searched=True, native="bf16", torch=("packed_bf16",), stepped=True),
    Scheme("fp16", "fp16", activations="fp16", products=("fp16",)),
    # E4M3 with an fp32 scale a block of 128 × 128: DeepSeek-V3's checkpoints (arXiv 2412.19437, section 3.3.2).
    Scheme(
        "fp8", "fp8", 4.0, 128, 128,
        activations="fp8", products=("fp8", "bf16"), published=("fp8", "fbgemm_fp8", "FP8", "FP8_PB_WO"), searched=True,
        native="bf16", torch=("packed_bf16",), disk=FLOAT_QUANTIZED, own="fp8-channel",
    ),
    # Ours, as `twostroke quantize` writes it and llm-compressor's FP8_DYNAMIC: an fp32 scale an output.
    Scheme(
        "fp8-channel", "fp8", 4.0, activations="fp8", products=("fp8", "bf16"),
        native="bf16", torch=("packed_bf16",), disk=FLOAT_QUANTIZED,
    ),
    # An fp32 scale an output. Accelerators hold weights alone so; w8a8 rounds activations too, as our engine always does.
    Scheme(
        "int8", "int8", 4.0, published=("gptq", "awq", "bitsandbytes", "W8A16"), searched=True, label="int8 × bf16",
        native="int8", torch=(W8, W8A8), stepped=True, disk=INT_QUANTIZED,
    ),
    Scheme("int8_weight_only", "int8", 4.0, planned=False, native="int8_weight_only", computed_from="int8"),
    Scheme(
        "w8a8", "int8", 4.0,
        activations="int8", products=("int8", "bf16"), published=("INT8_SQ", "W8A8_SQ_PER_CHANNEL"),
    ),
    # Groups of 128 inputs share an fp16 scale and a 4-bit zero point, as AWQ and GPTQ pack them: 4.16 bits a weight.
    Scheme(
        "int4", "int4", 2.5, group=128, published=("gptq", "awq", "bitsandbytes", "W4A16_AWQ", "W4A8_AWQ"), searched=True,
        native="int4", torch=("packed_bf16",), stepped=True, beside="int8", disk=PACK_QUANTIZED, own="int4-g64",
    ),
    *map(_fours, GROUPS),
    *map(_eights, INT8_GROUPS),
    # GGUF's Q4_K as it is: 256 inputs have two fp16 units, and in each eight groups of 32 a byte of scale and of minimum.
    Scheme(
        "int4-k", "int4", 20.0, group=BLOCK,
        planned=False, native="int4_blocks", torch=("packed_bf16",), beside="int8-g16", only_read=True,
    ),
    # As compressed-tensors pack it symmetrically: groups of 32 with one 16-bit scale, 4.5 bits a weight. Kimi-K2-Thinking's
    # experts are held so, all else in bf16.
    Scheme("int4-experts", "int4", 2.0, group=32, experts_only=True),
    # OCP Microscaling 1.0: blocks of 32 with one 8-bit exponent, 4.25 bits a weight.
    Scheme("mxfp4", "fp4", 1.0, group=32, experts_only=True, products=("fp4", "fp8", "bf16"), published=("mxfp4", "MXFP4")),
    # NVIDIA's: blocks of 16 with one E4M3 scale, 4.5 bits a weight.
    Scheme(
        "nvfp4", "fp4", 1.0, group=16,
        activations="fp4", products=("fp4", "fp8", "bf16"), published=("NVFP4", "W4A16_NVFP4"),
    ),
    # GGUF's: 8.5, 4.5, 5, 5.5 and 6 bits a weight in blocks of 32; super-blocks of 256 have 4.5, 5.5 and 6.56.
    _gguf("Q8_0", "int8", 2.0, 32, head="Q8_0"),
    _gguf("Q4_0", "int4", 2.0, 32),
    _gguf("Q4_1", "int4", 4.0, 32),
    _gguf("Q5_0", "int5", 2.0, 32),
    _gguf("Q5_1", "int5", 4.0, 32),
    _gguf("Q6_K", "int6", 18.0, 256),
    _gguf("Q5_K_M", "int5", 16.0, 256, mix=_HALF_WIDER),
    _gguf("Q5_K_S", "int5", 16.0, 256),
    _gguf("Q4_K_M", "int4", 16.0, 256, mix=_HALF_WIDER),
    _gguf("Q4_K_S", "int4", 16.0, 256, mix=(("v", "Q5_K_S", 0.125), ("down", "Q5_K_S", 0.125))),
)  # fmt: skip

SCHEMES: dict[str, Scheme] = {row.name: row for row in _ROWS}
"""By the name that options and ledger records use. Quantised schemes hold the blocks' matrices so, routers aside; embedding,
positions, output head, norms, biases and other small tensors stay in ``kept``."""

PLANNED = tuple(row.name for row in _ROWS if row.planned)
"""Those that can be planned on a datasheet's accelerators."""

SEARCHED = tuple(row.name for row in _ROWS if row.searched)

NATIVE = tuple(row.name for row in _ROWS if row.native)
"""Those that the native engine serves, and that a machine calibrated with it can be planned with."""

ASKED = tuple(name for name in NATIVE if not SCHEMES[name].only_read)
"""Those of them that plain weights can be rounded to."""

NATIVE_STEPS = tuple(row.name for row in _ROWS if row.stepped)
"""Those in which calibration measures whole steps of the native engine."""

WEIGHTS = tuple(dict.fromkeys(row.family for row in _ROWS if row.native))
"""What the engine calls them, without a group: the values of ``head_dtype``."""

TORCH_WEIGHTS = tuple(dict.fromkeys(row.family for row in _ROWS if row.torch))
"""Those of them that the torch runner runs."""

TORCH_HELD = tuple(row.name for row in _ROWS if row.torch and row.multiplied("torch") == row.name)
"""Those that the torch runner holds as they are; it expands others at loading."""

WRITTEN = tuple(row.name for row in _ROWS if row.disk is not None)
"""Those that `twostroke quantize` writes."""

DEFAULT_WRITTEN = "int8"

MIXED = tuple(row.name for row in _ROWS if row.beside is not None)
"""Those of which a directory may hold single matrices in another scheme, ``beside``."""

NATIVE_PRODUCTS: dict[str, tuple[str, int]] = {
    row.native_product: (row.native, row.group or 0) for row in _ROWS if row.native and row.own is None
}
"""Product of the native library → its format, and its inputs that share a scale (0: no groups)."""


_SPELLINGS = {name.casefold(): name for name in SCHEMES} | {"f16": "fp16", "f32": "fp32"}
"""As people type them: GGUF's names in small letters, llama.cpp's names of plain types."""


def scheme_of(name: str) -> Scheme:
    """The scheme called ``name``, in whatever letters; ConfigError for another name."""
    if name not in SCHEMES:
        name = _SPELLINGS.get(str(name).casefold(), name)
    if name not in SCHEMES:
        raise ConfigError(f"scheme={name!r} is not a way to hold weights. Use one of {', '.join(SCHEMES)}.")
    return SCHEMES[name]


def written_scheme(name: str) -> Scheme:
    """The scheme that `twostroke quantize --scheme name` writes; ConfigError for another name."""
    if name not in WRITTEN:
        raise ConfigError(f"scheme={name!r} is not a way to quantise. Use one of {', '.join(WRITTEN)}.")
    return SCHEMES[name].here


def published_schemes(method: object) -> tuple[Scheme, ...]:
    """Those whose published checkpoints name ``method`` so; several differ in bits."""
    return tuple(row for row in _ROWS if method in row.published)


@dataclass(frozen=True)
class CacheType:
    """How keys and values are cached: ``name`` is the type of an element, with ``scale_bytes`` for each head's key and for its
    value. ``native`` is the native library's number; None: planned only. ``transformed``: codes are of heads after a Hadamard
    transform, two a byte (``kernels.four_bit_cache``)."""

    name: str
    scale_bytes: float = 0.0
    native: int | None = None
    transformed: bool = False

    @property
    def scaled(self) -> bool:
        """Whether elements are codes with scales."""
        return self.scale_bytes > 0


_CACHES = (
    CacheType("fp32", native=0),
    CacheType("bf16", native=1),
    CacheType("fp16"),
    CacheType("fp8"),
    CacheType("int8", 4.0, native=2),
    CacheType("int4", 4.0, native=3, transformed=True),  # of a key: scale and middle of its range, 2 bytes each
)
CACHES: dict[str, CacheType] = {row.name: row for row in _CACHES}
CACHE_TYPES = tuple(row.name for row in _CACHES if row.native is not None)
"""How our engine caches."""
