"""``calibrate``: minutes of measurements that turn into this machine's ``MachineProfile``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import torch

from twostroke.calibration.adapter_rates import with_fitted_adapters
from twostroke.calibration.bandwidth import WORKING_SETS_BYTES, measure_read_bandwidth, working_sets
from twostroke.calibration.beside_steps import measure_beside_steps
from twostroke.calibration.collectives import is_launched, measure_between_processes, measure_in_launched_group
from twostroke.calibration.contended import measure_contended
from twostroke.calibration.launches import measure_launches
from twostroke.calibration.moments import NativeMoments
from twostroke.calibration.native_rates import (
    NATIVE_CLASSES,
    NATIVE_ROWS,
    measure_native_peak,
)
from twostroke.calibration.native_steps import with_fitted_prices
from twostroke.calibration.operations import measure_flash_limit
from twostroke.calibration.process import measure_disk, measure_fresh_process
from twostroke.calibration.products import (
    CLASSES,
    DEEP_CLASSES,
    ENGINE_ROWS,
    FP16,
    FP16_LAYOUTS,
    FP16_ROWS,
    PEAK_SIDE,
    SMALL_CLASSES,
    TRAINING_ROWS,
    TRAINING_SCHEMES,
    measure_class,
    measure_launch,
    measure_peak,
    weight_only_limit,
)
from twostroke.calibration.thread_limits import measure_thread_limits
from twostroke.calibration.timing import Clock
from twostroke.calibration.training_steps import AnchorSteps, in_a_new_process, kinds_on, means
from twostroke.calibration.transformer import (
    BlockSize,
    empty_compile_cache,
    half_blocks,
    measure_block,
    measure_loss,
    measure_nf4,
    measure_optimizers,
    measure_setup,
    mixed_type,
    start_compiler,
)
from twostroke.core.contention import recently, whole
from twostroke.core.crossovers import Crossovers
from twostroke.core.errors import ConfigError
from twostroke.core.profile import (
    ENGINES,
    SERVING_DEVICE,
    BandwidthPoint,
    MachineProfile,
    MatmulPoint,
    load_profile,
    read_fingerprint,
)
from twostroke.core.rates import (
    BlockRates,
    Conditions,
    Contended,
    Engine,
    Mode,
    NativeRates,
    Process,
    TrainingRates,
    TrainingStep,
)
from twostroke.core.schemes import NATIVE_PRODUCTS, W8, W8A8
from twostroke.core.units import MIB
from twostroke.kernels import training_attention
from twostroke.kernels.native_library import library

Progress = Callable[[float, str], None]
"""``progress(done, note)``: the share done, 0 to 1, and a few words on what is being measured."""


@dataclass(frozen=True)
class Extent:
    """How much to measure. The default takes ``CALIBRATION_TIME``; ``SMALL`` a few seconds, for tests, with numbers too
    rough to plan by. ``engine_…`` is what is measured of torch's products where there is no native library, ``native_…`` where
    there is one."""

    effort: float = 1.0
    training_rows: tuple[int, ...] = TRAINING_ROWS
    engine_rows: tuple[int, ...] = ENGINE_ROWS
    classes: tuple[tuple[int, int], ...] = CLASSES
    small_classes: tuple[tuple[int, int], ...] = SMALL_CLASSES
    deep_classes: tuple[tuple[int, int], ...] = DEEP_CLASSES
    training_schemes: tuple[str, ...] = TRAINING_SCHEMES
    engine_schemes: tuple[str, ...] = (W8, W8A8)
    native_schemes: tuple[str, ...] = tuple(NATIVE_PRODUCTS)
    native_classes: tuple[tuple[int, int], ...] = NATIVE_CLASSES
    native_rows: tuple[int, ...] = NATIVE_ROWS
    peak_side: int = PEAK_SIDE
    largest_working_set_bytes: int = WORKING_SETS_BYTES[-1]
    block: BlockSize = field(default_factory=BlockSize)
    compile: bool = True
    disk_bytes: int = 128 * MIB
    fresh_process: bool = True
    whole_steps: bool = True
    ranks: int = 2


ON_GPU = Extent(block=BlockSize(heads=32, d_ff=5632, tokens=16384, eager_tokens=8192, short=512, long=2048, vocab_size=32000))
"""A GPU's: a block of the processor's size would measure how fast the processor launches it."""

SMALL = Extent(
    effort=0.02,
    training_rows=(16, 32),
    engine_rows=(1, 16),
    classes=((64, 64),),
    small_classes=(),
    deep_classes=((64, 128),),
    native_classes=((64, 64),),
    native_rows=(1, 16),
    peak_side=256,
    largest_working_set_bytes=8 * MIB,
    block=BlockSize(heads=1, d_ff=128, tokens=64, eager_tokens=64, short=16, long=32, vocab_size=300, chunk_rows=64),
    compile=False,
    disk_bytes=4 * MIB,
    fresh_process=False,
    whole_steps=False,
    ranks=1,
)


def pick_device(device: str | None) -> str:
    """Where training runs, "cpu" or "cuda": what was asked for, else cuda where torch has it.

    Raises ConfigError for what is not there."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} cannot be calibrated. Use cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' was asked for, but torch finds no CUDA device here. Use cpu.")
    return device


def engines_by_device(device: str | None, only: str | None) -> dict[str, list[Engine]]:
    """The engines that are measured, by the device that each computes on; arguments and errors as of ``calibrate_engines``."""
    if only not in (None, *ENGINES):
        raise ConfigError(f"only={only!r} is not an engine to calibrate. Use one of {', '.join(ENGINES)}, or leave it out.")
    trains_on = pick_device(device)
    found: dict[str, list[Engine]] = {}
    for engine in ENGINES:
        if only in (None, engine):
            found.setdefault(trains_on if engine == "train" else SERVING_DEVICE, []).append(engine)
    return found


def calibrate_engines(
    progress: Progress | None = None,
    extent: Extent | None = None,
    device: str | None = None,
    n_ranks: int | None = None,
    only: str | None = None,
) -> Iterator[MachineProfile]:
    """Measure each engine on the device that it computes on: training on ``device`` (default: cuda where torch has it), serving
    on the CPU. One profile a device, each as soon as it is measured; arguments and errors as of ``calibrate``, ``only``
    "train" or "serve" measures that engine alone.
    """
    by_device = engines_by_device(device, only)
    for i, (place, engines) in enumerate(by_device.items()):

        def tell(done: float, note: str, before: int = i, place: str = place) -> None:
            if progress is not None:
                progress((before + done) / len(by_device), note if len(by_device) == 1 else f"{place}: {note}")

        ranks = n_ranks if i == 0 else 1  # collectives join the devices that train
        yield calibrate(tell, extent, place, ranks, engines[0] if len(engines) == 1 else None, first=i == 0)


def calibrate(
    progress: Progress | None = None,
    extent: Extent | None = None,
    device: str = SERVING_DEVICE,
    n_ranks: int | None = None,
    only: Engine | None = None,
    first: bool = True,
) -> MachineProfile:
    """Measure one device of this machine and return its profile (``core.profile.save_profile`` stores it).

    Collectives are measured between ``n_ranks`` processes (default: one for each GPU, two on a CPU of several cores that is to
    train), or between the ranks that a launcher started, of which this is the first and the others call
    ``collectives.measure_in_launched_group``; not at all where another device was measured ``first``.

    ``only`` "serve" or "train" leaves out what the other engine needs; the rest is taken from the stored profile of the device,
    where it has one (``merged``). On a GPU it is "train": serving computes on the CPU.

    Numbers of the native engine are medians of three moments, minutes apart; others are the best of several runs, since other
    work only ever adds time. Rates are for all threads that torch uses.
    Raises ConfigError for a ``device`` that is not there.
    """
    device = pick_device(device)
    extent = extent or (ON_GPU if device == "cuda" else Extent())
    if device != SERVING_DEVICE and only != "train":
        raise ConfigError(f"serving does not compute on device={device!r}. Measure training there: only='train'.")
    clock = Clock(device, extent.effort)
    tell = progress or (lambda done, note: None)
    fingerprint = read_fingerprint()
    if not n_ranks:
        on_cpu = min(extent.ranks, fingerprint.n_cores) if only != "serve" else 1
        n_ranks = torch.cuda.device_count() if device == "cuda" else on_cpu

    tell(0.0, "process and disk")  # first: a folder that cannot be written is no news after minutes
    process = measure_fresh_process() if extent.fresh_process else Process()
    write_rate, read_rate = measure_disk(extent.disk_bytes)
    device_memory = int(torch.cuda.get_device_properties(0).total_memory) if device == "cuda" else None
    sizes = working_sets(device_memory or fingerprint.ram_bytes, extent.largest_working_set_bytes)
    is_native = device == "cpu" and library() is not None
    serves_natively = is_native and only != "train"
    crossovers = Crossovers()
    moments: NativeMoments | None = None
    if is_native:
        if serves_natively and extent.whole_steps:
            tell(0.02, "one thread or all")
            crossovers = measure_thread_limits(clock, crossovers)
        moments = _native_moments(clock, extent, sizes, crossovers if serves_natively else None)
    _take(moments, tell, 0.05)
    training = TrainingRates(attends_natively=device == "cpu" and training_attention.is_available())
    steps = AnchorSteps(clock)
    if only != "serve":
        if extent.compile:
            start_compiler(device)  # in the user's own cache, so that the first run does not wait 12 s for it
        with empty_compile_cache():
            training = _measure_training(clock, extent, training, steps, lambda done, note: tell(0.14 + 0.4 * done, note))
        tell(0.54, "around the blocks")
        training = measure_setup(clock, extent.block, training)
    _take(moments, tell, 0.56)
    if only != "serve":
        tell(0.65, "optimizers")
        training = measure_optimizers(clock, extent.block, training)
    tell(0.67, "launch costs")
    op_launch_s, linear_launch_s = measure_launches(clock)
    bandwidth: list[BandwidthPoint] = []
    if moments is None:
        for point in measure_read_bandwidth(clock, sizes):
            bandwidth.append(point)
            tell(0.68 + 0.02 * len(bandwidth) / len(sizes), f"read bandwidth, {point.working_set_bytes // MIB} MiB")
    engine_schemes = () if is_native or only == "train" else extent.engine_schemes
    products, peaks = _measure_products(clock, extent, engine_schemes, lambda done, note: tell(0.67 + 0.07 * done, note))
    launches = {scheme: measure_launch(clock, scheme) for scheme in (*extent.training_schemes, *engine_schemes)}
    limit = weight_only_limit(products)
    if limit is not None:
        crossovers = replace(crossovers, int8_weight_only_max_macs=limit)
    if device == "cpu" and not is_native and only != "train":
        tell(0.74, "attention of the engine")
        crossovers = replace(crossovers, flash_max_scores=measure_flash_limit(clock))
    link = network = None
    if is_launched() and first:
        ring, between_nodes = measure_in_launched_group(device)
        link, network = (None, ring) if between_nodes else (ring, None)
    elif n_ranks > 1:
        link = measure_between_processes(n_ranks, device)
    engines: tuple[Engine, ...] = (only,) if only else ENGINES
    tell(0.75, "text, weights, sampling and HTTP")
    beside = measure_beside_steps(clock, device == "cpu" and only != "train", serves_natively and extent.whole_steps)
    _take(moments, tell, 0.86)
    others_used = recently().used if moments is None else moments.others_used
    contended = Contended()
    if device == "cpu" and extent.whole_steps and whole(others_used) + 1 < fingerprint.n_cores:
        tell(0.95, "beside another program")
        contended = measure_contended(clock, steps if only != "serve" else None, serves_natively)
    native: NativeRates | None = None
    if moments is not None:
        bandwidth = [*moments.bandwidth]
        if serves_natively:
            native = moments.rates
            products += moments.products
            peaks |= _native_peaks(clock, extent, moments.products)
    low_by: dict[str, float] = dict.fromkeys(engines, clock.low_by_share)
    tell(1.0, "done")

    profile = MachineProfile(
        fingerprint=fingerprint,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        device=device,
        n_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        read_bandwidth=tuple(bandwidth),
        matmul=tuple(products),
        peak_flop_per_s=peaks,
        op_launch_s=op_launch_s,
        linear_launch_s=linear_launch_s,
        disk_write_bytes_per_s=write_rate,
        disk_cached_read_bytes_per_s=read_rate,
        product_launches_s={scheme: launch_s for scheme, launch_s in launches.items() if launch_s is not None},
        device_memory_bytes=device_memory,
        process=process,
        training=training,
        native=native,
        crossovers=crossovers,
        link=link,
        network=network,
        contended=contended,
        conditions=Conditions(clock.disturbed_share, low_by, clock.elapsed_s, others_used),
        engines=engines,
        **beside,
    )
    profile = with_fitted_adapters(with_fitted_prices(profile))
    stored = load_profile(device=device) if only else None
    return profile if stored is None else merged(stored, profile)


def merged(before: MachineProfile, now: MachineProfile) -> MachineProfile:
    """``now``, and of ``before`` what was not measured this time."""
    measured = {point.scheme for point in now.matmul}
    trained = now if "train" in now.engines else before
    served = now if "serve" in now.engines else before
    return replace(
        now,
        matmul=(*(point for point in before.matmul if point.scheme not in measured), *now.matmul),
        peak_flop_per_s=before.peak_flop_per_s | now.peak_flop_per_s,
        product_launches_s=before.product_launches_s | now.product_launches_s,
        training=trained.training,
        native=served.native,
        crossovers=served.crossovers,
        sampling=served.sampling,
        http=served.http,
        contended=replace(served.contended, training=trained.contended.training),
        link=now.link or before.link,
        network=now.network or before.network,
        conditions=replace(now.conditions, low_by_share=before.conditions.low_by_share | now.conditions.low_by_share),
        engines=tuple(engine for engine in ENGINES if engine in (*before.engines, *now.engines)),
    )


def _measure_training(clock: Clock, extent: Extent, rates: TrainingRates, steps: AnchorSteps, tell: Progress) -> TrainingRates:
    """``rates`` with whole steps of the anchors at three moments, compiled where a compiler works, as training does it by
    default, and one eager; between them a block and the loss by themselves, both ways. The first anchor compiles into an empty
    cache once the compiler has started: its first step says what compiling takes."""
    compile_s = compiler_start_s = None
    tell(0.0, "compiler")
    is_compiled = extent.compile and start_compiler(clock.device)
    compiled, eager = kinds_on(clock.device)
    kinds = (*(compiled if is_compiled else ()), *eager) if extent.whole_steps else ()
    moments: list[list[TrainingStep]] = []

    def take(begin: float, end: float) -> None:
        found: list[TrainingStep] = []
        for i, kind in enumerate(kinds):
            tell(begin + (end - begin) * i / len(kinds), str(kind))
            found += steps.measure(kind)
        moments.append(found)

    take(0.1, 0.45)
    blocks: list[BlockRates] = []
    mixed = mixed_type(clock.device)
    blocks_of: list[tuple[str, Mode]] = [(mixed, "compiled")] if is_compiled else []
    blocks_of += [(dtype, "eager") for dtype in dict.fromkeys((mixed, "fp32"))]
    for i, (dtype, mode) in enumerate(blocks_of):
        tell(0.45 + 0.05 * i, f"one transformer block, {dtype} {mode}")
        blocks += measure_block(clock, extent.block, dtype, mode)
    if clock.device == "cpu" and mixed == "bf16":
        blocks += half_blocks(clock, extent.block, blocks)
    take(0.6, 0.7)
    tell(0.7, "loss")
    losses = measure_loss(clock, extent.block, is_compiled)
    decoded = measure_nf4(clock, is_compiled)
    tell(0.75, "memory of new processes")
    if is_compiled and moments[0]:
        compile_s = max(moments[0][0].first_step_s - moments[0][0].seconds, 1e-3)
        moments[0], compiler_start_s = in_a_new_process(moments[0], compiled[0], clock.device)
    if clock.device == "cpu":  # a GPU's memory holds nothing of the process
        if is_compiled and moments[0]:
            moments[0], _ = in_a_new_process(moments[0], compiled[-1], clock.device)
        moments[0], _ = in_a_new_process(moments[0], eager[0], clock.device)
    take(0.9, 1.0)
    return replace(
        rates,
        blocks=tuple(blocks),
        steps=tuple(means(moments)),
        block_compile_s=compile_s,
        compiler_start_s=compiler_start_s,
        cross_entropy_logit_per_s=losses,
        nf4_weight_per_s=decoded,
    )


def _native_moments(clock: Clock, extent: Extent, sizes: Sequence[int], crossovers: Crossovers | None) -> NativeMoments:
    """Of reading alone without ``crossovers``, since nothing is served then."""
    schemes = extent.native_schemes if crossovers is not None else ()
    steps = crossovers if extent.whole_steps else None
    return NativeMoments(clock, schemes, sizes, extent.native_classes, extent.native_rows, steps)


def _take(moments: NativeMoments | None, tell: Progress, done: float) -> None:
    if moments is not None:
        tell(done, "the engine's products and steps")
        moments.take()


def _native_peaks(clock: Clock, extent: Extent, points: Sequence[MatmulPoint]) -> dict[str, float]:
    """The best rate of each format that was seen: a kernel may like another shape better than the cube."""
    cubes = {scheme: measure_native_peak(clock, scheme, extent.peak_side) for scheme in extent.native_schemes}
    peaks = {scheme: peak for scheme, peak in cubes.items() if peak is not None}
    for point in points:
        peaks[point.scheme] = max(peaks.get(point.scheme, 0.0), point.flop_per_s)
    return peaks


@torch.inference_mode()
def _measure_products(
    clock: Clock, extent: Extent, engine: tuple[str, ...], tell: Progress
) -> tuple[list[MatmulPoint], dict[str, float]]:
    """What training computes, and ``engine``'s schemes of torch's."""
    points: list[MatmulPoint] = []
    peaks: dict[str, float] = {}
    mixed = mixed_type(clock.device)
    training = [scheme for scheme in extent.training_schemes if scheme in (mixed, "fp32")]
    plan = [
        (s, n, k, extent.training_rows)
        for s in training
        for n, k in (*extent.small_classes, *extent.classes, *extent.deep_classes)
    ]
    plan += [(s, n, k, extent.engine_rows) for s in engine for n, k in extent.classes]
    if clock.device == "cpu" and mixed == "bf16":
        plan += [(layout, n, k, FP16_ROWS) for layout in FP16_LAYOUTS[:2] for n, k in extent.classes[:1]]
        plan += [(FP16_LAYOUTS[2], n, k, FP16_ROWS) for n, k in extent.deep_classes[:1]]
    for i, (scheme, n, k, rows) in enumerate(plan):
        tell(0.7 * i / len(plan), f"{scheme} products, {n}×{k}")
        points += measure_class(clock, scheme, n, k, rows)
    peak_schemes = (*training, *engine)
    for i, scheme in enumerate(peak_schemes):
        # Only the types that MFU is quoted in need the full 4096³.
        side = extent.peak_side if scheme in training else extent.peak_side // 2
        tell(0.7 + 0.3 * i / len(peak_schemes), f"{scheme} peak, {side}³")
        peak = measure_peak(clock, scheme, side)
        if peak is not None:
            peaks[scheme] = peak
    halves = [point.flop_per_s for point in points if point.scheme == FP16]
    return points, peaks | ({FP16: max(halves)} if halves else {})
