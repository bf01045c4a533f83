"""Prefill and decode in the native engine: products at the library's measured rates, what surrounds them as whole steps of the
engine showed it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from twostroke.core.matrices import Matrix, after_attention, block_kinds, head_matrix, layer_kinds, pair_flops
from twostroke.core.named import largest, letter, named, smallest
from twostroke.core.policy import LEAST_KEPT_PACKED_BYTES, TOKEN_BUDGET
from twostroke.core.rates import PAGE_BYTES, Phase
from twostroke.core.schemes import scheme_of
from twostroke.core.spec import ModelSpec
from twostroke.planner.hardware.anchors import PREFILL_ANCHORS, SHALLOW, NativeAnchor, Ratios, has_steps, ratio_at
from twostroke.planner.hardware.corrections import learned_factor
from twostroke.planner.hardware.device import Hardware
from twostroke.planner.hardware.present import threads_left
from twostroke.planner.money.power import busy_of
from twostroke.planner.serving.adapters import adapter_works, read_bytes
from twostroke.planner.serving.memory import touched_pages
from twostroke.planner.serving.native_products import (
    MANY_ROWS,
    far_share,
    native_matrices,
    native_name,
    native_product_bytes,
    native_product_s,
    native_read_bytes,
    native_reuse_bytes,
    native_weights_bytes,
)
from twostroke.planner.serving.sampling import choosing_s
from twostroke.planner.serving.shape import ServingShape
from twostroke.planner.serving.strategy import Chunk, Step, Strategy
from twostroke.planner.work.component import Work, bound_of, merge, total_seconds
from twostroke.planner.work.flops import elementwise_elements, row_flop, visible_pairs
from twostroke.planner.work.params import count_parameters
from twostroke.planner.work.weights import experts_touched, kv_bytes_per_token, mixed_weights_bytes


def product_work(use: Use, working_set: float, hardware: Hardware) -> Work:
    """One weight matrix (or a gated pair) on its rows: 2·rows·n·k FLOP, packed weights read once. The limits beside its
    seconds are the rate that many rows reach, and reading."""
    product, name, rows = use.product, use.name, use.rows
    n_bytes = native_product_bytes(product, name)
    seconds = sum(
        native_product_s(name, rows, n, k, working_set, hardware, use.one_thread) for n, k in native_matrices(product)
    )
    source = f"{name.removeprefix('native_')} as calibrated over W₀, of which a share is reading; β at this working set"
    seconds = named(f"{product.name}_{rows}_rows_s", seconds, "s", source, "measured")
    flop, memory_s = 2.0 * rows * product.weights, n_bytes / hardware.bandwidth(working_set)
    arithmetic_s = flop / hardware.product_rate(name, MANY_ROWS, product.n, product.k)
    return Work(product.component, flop, n_bytes, arithmetic_s, memory_s, 0.0, seconds)


def elements_of(spec: ModelSpec, rows: int) -> dict[str, float]:
    """Numbers that norms, rotation of heads, writing the cache and activation (and quantising rows for the products) read and
    write in one layer, by component."""
    spec = spec.attended
    counts = elementwise_elements(spec, layer_kinds(spec)[0][0], backward=False)
    counts["attention"] += 2.0 * spec.n_kv_heads * spec.head_dim
    if spec.qk_norm:
        counts["attention"] += 2.0 * (spec.n_heads + spec.n_kv_heads) * spec.head_dim
    return {component: rows * count for component, count in counts.items()}


def attention_flop(spec: ModelSpec, start: int, count: int) -> float:
    """4·H·D for each pair of a query and a key that it sees, all layers, for tokens start + 1 … start + count."""
    windows = [spec.window_of_layer(layer) or start + count for layer in range(spec.n_layers)]
    pairs = sum(visible_pairs(start, count, window) for window in windows)
    return 1.0 * pair_flops(spec.attended) * pairs


def chunks(shape: ServingShape) -> list[tuple[int, int]]:
    """(tokens before it, tokens) of each step that computes the prompt."""
    ends = [*range(shape.hit_tokens, shape.prompt_tokens, shape.token_budget or TOKEN_BUDGET), shape.prompt_tokens]
    return [(first, last - first) for first, last in itertools.pairwise(ends)]


def _keys(spec: ModelSpec, shape: ServingShape) -> float:
    """Keys that a token at the mean context sees in a layer, the mean over layers."""
    windows = [spec.window_of_layer(i) or shape.context for i in range(spec.n_layers)]
    return sum(min(shape.context, window) for window in windows) / spec.n_layers


ENGINE_BYTES = 18e6
"""What an engine keeps beside weights and cache: code imported with it, plans, tables (measured with the 135M shape)."""

FAULT_BYTES = 65536
"""Bytes of a mapped file that the system brings in when one of them is asked for: sixteen pages."""


def embedding_in_memory_bytes(spec: ModelSpec, n_tokens: float) -> float:
    """Of the embedding table, which stays in its file, what looking up ``n_tokens`` different tokens brings into memory:
    c·(1 − (1 − 1/c)^n) pieces of ``FAULT_BYTES``, c of them in the table. The file holds 16 bits an element."""
    pieces = max(1.0, 2.0 * spec.vocab_size * spec.d_model / FAULT_BYTES)
    return pieces * (1.0 - (1.0 - 1.0 / pieces) ** n_tokens) * FAULT_BYTES


class Use(NamedTuple):
    """A weight matrix (or gated pair, or one expert's) held for the product ``name``, applied ``times`` over to ``rows`` rows,
    by one thread or by all."""

    product: Matrix
    name: str
    rows: int
    times: float
    one_thread: bool = False


def _use(product: Matrix, name: str, rows: int, layers: int, one_thread: bool) -> Use:
    """``product`` in so many layers; of experts those that ``rows`` tokens choose, each on its share of their rows."""
    if product.copies == 1 or not rows:
        return Use(product, name, rows, layers, one_thread)
    touched = experts_touched(product.copies, product.active, rows)
    return Use(product, name, max(1, round(rows * product.active / touched)), layers * touched, one_thread)


def widest_mlp(spec: ModelSpec) -> int:
    """Numbers that are activated for one token in the widest layer, of routed experts ``top_k`` of theirs."""
    return max(sum(p.active * p.k for p in matrices if p.name.endswith("down")) for matrices, _ in block_kinds(spec))


class Native(Strategy):
    """Each phase is its products at the library's rates, and what surrounds them in units whose price calibration fitted to
    whole steps (``calibration.native_steps``)."""

    @property
    def cached(self) -> ModelSpec:
        return self.spec.attended

    # -- memory

    def weights_bytes(self) -> float:
        shape = self.shape
        packed = native_weights_bytes(self.spec, shape.scheme, shape.head, shape.others)
        multiplied = scheme_of(shape.scheme).multiplied("native")
        source = f"packed by the native library in {multiplied}, the head in {shape.head}; an embedding of its own"
        return named("weights_bytes", packed, "bytes", source)

    @property
    def stored_scheme(self) -> str:
        return scheme_of(self.shape.scheme).here.name

    def touched_cache_bytes(self, set_aside: float) -> float:
        touched = smallest(set_aside, touched_pages(self.spec, self.shape) * self.page_bytes())
        source = "the cache takes memory as its pages are touched; a server that runs on fills all of it"
        return named("kv_touched_bytes", touched, "bytes", source)

    def working_bytes(self) -> float:
        """Residual stream, its norm, packed heads, attention's output and the MLP's inside of the largest step, in fp32 and in
        what products read (half as much); and the looked-up part of a tied embedding."""
        spec, shape = self.spec, self.shape
        heads = (2 * spec.n_heads + 2 * self.cached.n_kv_heads) * self.cached.head_dim  # packed, and attention's output
        row = 6.0 * (2 * spec.d_model + heads + 2 * widest_mlp(spec))
        tokens = shape.prompts * (shape.prompt_tokens - shape.hit_tokens)
        rows = largest(shape.batch, smallest(letter("budget", self.token_budget), tokens))
        looked_up = 0.0
        if spec.tied_embeddings:
            seen = shape.prompts * shape.prompt_tokens + shape.batch * shape.output_tokens
            looked_up = letter("looked_up", embedding_in_memory_bytes(spec, seen))
        source = "working memory of the largest step; the parts of a tied embedding that are looked up in its file"
        return named("activations_bytes", rows * row + looked_up, "bytes", source)

    def process_bytes(self) -> float:
        return super().process_bytes() + letter("engine", ENGINE_BYTES)

    # -- start

    def load_s(self) -> float:
        """Packed weights from the file that a first start wrote; a small model has none and is packed anew."""
        is_kept = self.weights_bytes() >= LEAST_KEPT_PACKED_BYTES
        return super().load_s() if is_kept else self.first_load_s()

    def first_load_s(self) -> float:
        """Reading the stored weights, packing every matrix for the library and, of what is kept, writing it."""
        hardware, packed = self.hardware, self.weights_bytes()
        reading = hardware.disk_cached_read_bytes_per_s or hardware.disk_write_bytes_per_s
        stored = mixed_weights_bytes(self.spec, self.stored_scheme, self.shape.others)
        writing_s = packed / hardware.disk_write_bytes_per_s if packed >= LEAST_KEPT_PACKED_BYTES else 0.0
        elements = count_parameters(self.spec).in_products
        rate = hardware.weights.packed_per_s.get(scheme_of(self.shape.scheme).family)
        packing_s = elements / letter("packing", rate) if rate else 0.0
        return named("first_load_s", stored / reading + packing_s + writing_s, "s", "reading, packing and keeping the weights")

    # -- time

    def prefill(self) -> tuple[Work, ...]:
        """Held to calibration's prompts, at this width and so many tokens. Decode steps are not: where they are off, weights
        came from the last cache or did not, which is a matter of the model's size and not of its width (held to the wide
        anchor, the 135M shape's bf16 step came out a quarter short; as planned it is right within 5%)."""
        new = max(1, self.shape.prompt_tokens - self.shape.hit_tokens)
        ratio = self._prefill_ratio(new)
        return merge([*(work.stretched(ratio) for work in self.as_planned("prefill")), *self._new_pages(new)])

    def _new_pages(self, new: int) -> list[Work]:
        """The system clears pages of the cache as a prompt is the first to touch them, each thread its own. Steps that
        calibration repeats find them touched. A load does, too, once it has been through its cache: a step of it has none of
        this."""
        fault_s = self.hardware.process.page_fault_s
        if fault_s is None:
            return []
        touched = letter("pages", new * kv_bytes_per_token(self.cached, self.shape.cache_dtype) / PAGE_BYTES)
        seconds = touched * letter("fault_s", fault_s) / self._threads(new)
        named_s = named("new_pages_s", seconds, "s", "pages of the cache that no request has touched before", "measured")
        return [Work.limited("attention", 0.0, 0.0, 0.0, 0.0, named_s)]

    def _prefill_ratio(self, tokens: int) -> float:
        ratios = anchor_ratios(type(self.shape)(scheme=self.shape.scheme), self.hardware)
        return learned_factor(self.hardware, "prefill") * ratio_at(ratios, self.spec.d_model, tokens)

    def decode(self, batch: int | None = None) -> tuple[Work, ...]:
        engine = self if batch is None else Native(self.spec, replace(self.shape, batch=batch), self.hardware)
        return tuple(work.stretched(learned_factor(self.hardware, "decode")) for work in engine.as_planned("decode"))

    def step(self, batch: int) -> Step:
        works = self.decode(batch)
        return Step(total_seconds(works), 0.0, bound_of(works), busy_of(works))

    def step_seconds(self, decoding: int, context: float, chunks: Sequence[Chunk]) -> float:
        """With prompts all rows go through the products together, and what surrounds them has the prices of prompts; each
        decoding request has its row and walks its keys as in a step of its own kind."""
        if not chunks:
            return self._alone(decoding, context).decode_s()
        new, spec = sum(chunk.new for chunk in chunks), self.spec
        rows = decoding + new
        threads = self._threads(rows, decoding)
        units = {
            "step": 1.0,
            "layer": float(spec.n_layers),
            "barrier": float(spec.n_layers if threads > 1 else 0),
            "element": rows * self._elements_of_a_row / threads,
        }
        units["attention"] = sum(attention_flop(spec, chunk.before, chunk.new) for chunk in chunks) / threads
        units["cached"] = units["attention"]
        priced = {unit: count * self._price("prefill", unit) for unit, count in units.items()}
        read = sum(chunk.before + chunk.new for chunk in chunks) * kv_bytes_per_token(self.cached, self.shape.cache_dtype)
        priced["attention"] = max(
            priced["attention"] + priced.pop("cached"), read / self.hardware.bandwidth(self._working_set("prefill"))
        )
        ratio = self._prefill_ratio(new)
        adapters_s = total_seconds(
            adapter_works(spec, self.shape, self.hardware, decoding + len(chunks), rows, self._working_set("prefill"))
        )
        products_s = self._products_s(rows, decoding + sum(chunk.samples for chunk in chunks), decoding)
        seconds = ratio * (products_s + adapters_s + sum(priced.values()))
        if not decoding:
            return seconds
        alone = self._alone(decoding, context)
        units = alone.units("decode")
        names = ("row", "logit", "attention", "key", "far_key", "cached")
        rows_s, logits_s, *walking = (units[unit] * self._price("decode", unit) for unit in names)
        reading_s = alone._cache_bytes() / self.hardware.bandwidth(alone._working_set("decode"))
        return seconds + learned_factor(self.hardware, "decode") * (rows_s + logits_s + max(sum(walking), reading_s))

    def _alone(self, decoding: int, context: float) -> Native:
        """A step in which ``decoding`` requests have ``context`` tokens before them."""
        before = max(1, round(context) - 1)
        shape = replace(
            self.shape, batch=decoding, prompt_tokens=before, output_tokens=1, prefix_hit_share=0.0, answers=1, max_model_len=0
        )
        return Native(self.spec, shape, self.hardware)

    @cached_property
    def _elements_of_a_row(self) -> float:
        return self.spec.n_layers * sum(elements_of(self.spec, 1).values())

    def _products_s(self, rows: int, sampled: int, decoding: int) -> float:
        """Seconds of the products of a step with prompts, the logits of ``sampled`` rows with them. Kept: a load has few
        different steps."""
        found = self._products.get((rows, sampled, decoding))
        if found is None:
            uses = self._uses_of_step(rows, min(rows, sampled), decoding)
            found = total_seconds(self._products_of(uses, self._working_set("prefill")))
            self._products[rows, sampled, decoding] = found
        return found

    @cached_property
    def _products(self) -> dict[tuple[int, int, int], float]:
        return {}

    def added_s(self, prefill_s: float, step_s: float, batch: int | None = None) -> float:
        """A prompt is computed in steps of its own rows beside one row of each other request: its whole prefill."""
        return prefill_s

    def check_s(self) -> float | None:
        """The rows of γ + 1 times as many requests. Their cache is read once a row, so this is the slower side."""
        if self.shape.speculation is None:
            return None
        return total_seconds(self.decode((self.shape.speculation.draft_tokens + 1) * self.shape.batch))

    def as_planned(self, phase: Phase) -> tuple[Work, ...]:
        """Products, and what surrounds them, from the rates of parts."""
        spec, shape = self.spec, self.shape
        units = self.units(phase)
        if phase == "prefill":
            keys = sum(start + count for start, count in chunks(shape))
            flop = sum(attention_flop(spec, start, count) for start, count in chunks(shape))
            kv_bytes = keys * kv_bytes_per_token(self.cached, shape.cache_dtype)
        else:
            flop, kv_bytes = shape.batch * attention_flop(spec, shape.context, 1), self._cache_bytes()
        around = self._around(phase, units, flop, kv_bytes)
        return merge([*self.products(phase), *self._adapters(phase), *around])

    def _adapters(self, phase: Phase) -> list[Work]:
        """What adapters add to a decode step, or to every step of a prompt."""
        shape, working_set = self.shape, self._working_set(phase)
        steps = [(shape.batch, shape.batch)] if phase == "decode" else [(1, count) for _, count in chunks(shape)]
        return [
            work
            for requests, rows in steps
            for work in adapter_works(self.spec, shape, self.hardware, requests, rows, working_set)
        ]

    def units(self, phase: Phase) -> dict[str, float]:
        """What a phase has beside its products: steps, layers, elements, and of a prompt FLOP of attention. A decode step has
        a row a request, whose token is looked for among the logits and handed on, FLOP of attention, and numbers of keys and
        values that are walked: a key head is read once for all its query heads. Numbers from memory count by their bytes.
        ``cached`` is what a cache of another type than bf16 takes more for."""
        spec, shape = self.spec, self.shape
        layers, batch = spec.n_layers, shape.batch
        if phase == "prefill":
            parts = [(start, count, self._threads(count)) for start, count in chunks(shape)]
            attention = sum(attention_flop(spec, start, count) / threads for start, count, threads in parts)
            return {
                "step": len(parts),
                "layer": len(parts) * layers,
                "barrier": layers * sum(threads > 1 for _, _, threads in parts),
                "element": layers * sum(sum(elements_of(spec, count).values()) / threads for _, count, threads in parts),
                "attention": attention,
                "cached": attention,
            }
        threads = self._threads(batch, batch)
        cached = self.cached
        keys = 2.0 * batch * layers * _keys(spec, shape) * cached.n_kv_heads * cached.head_dim / threads
        wide = kv_bytes_per_token(cached, shape.cache_dtype) / kv_bytes_per_token(cached)  # of the bf16 that is priced
        return {
            "step": 1.0,
            "row": float(batch),
            "logit": float(batch * spec.vocab_size),
            "layer": float(layers),
            "barrier": float(layers if threads > 1 else 0),
            "element": layers * sum(elements_of(spec, batch).values()) / threads,
            "attention": batch * attention_flop(spec, shape.context, 1) / threads,
            "key": keys,
            "cached": keys,
            "far_key": keys * wide * far_share(self._working_set("decode"), self.hardware),
        }

    def on_all_threads(self, rows: int, decoding: int) -> bool:
        return not self._takes_one_thread(rows, decoding)

    def _threads(self, rows: int, decoding: int = 0) -> int:
        """Threads that a step of ``rows`` tokens, of ``decoding`` requests that decode and of prompts, runs on, as the engine
        chooses them."""
        all_threads = self.hardware.native_rates.n_threads
        return 1 if self._takes_one_thread(rows, decoding) else threads_left(self.hardware, all_threads)

    def _takes_one_thread(self, rows: int, decoding: int) -> bool:
        """Whether it is so few that one thread computes it, or other programs leave no more, on a machine whose single thread
        was measured."""
        rates, shape = self.hardware.native_rates, self.shape
        if rates.n_threads > 1 and threads_left(self.hardware, rates.n_threads) == 1:
            return True
        weights = native_read_bytes(self.spec, shape.scheme, shape.head, shape.others)
        served = decoding if shape.in_server else 0
        return rates.n_threads > 1 and self.hardware.crossovers.takes_one_thread(weights, rows * row_flop(self.spec), served)

    def products(self, phase: Phase) -> list[Work]:
        """What a phase's matrices take, and writing and reading the logits in fp32."""
        return self._products_of(self.uses(phase), self._working_set(phase))

    def _products_of(self, uses: list[Use], working_set: float) -> list[Work]:
        works = [product_work(use, working_set, self.hardware).times(use.times) for use in uses]
        sampled = sum(use.rows for use in uses if use.product.name == "head")
        logits = 8.0 * sampled * uses[-1].product.n
        return [*works, Work.limited("head", 0.0, logits, 0.0, logits / self.hardware.bandwidth(logits))]

    def uses(self, phase: Phase) -> list[Use]:
        """The matrices of a decode step, or of a prompt in as many steps as the token budget makes of it. Only the prompt's
        last token is sampled from."""
        if phase == "decode":
            return self._uses_of_step(self.shape.batch, self.shape.batch, self.shape.batch)
        parts, found = chunks(self.shape), Counter[Use]()
        for i, (_, count) in enumerate(parts):
            for use in self._uses_of_step(count, 1 if i == len(parts) - 1 else 0):
                found[use] += 1
        return [use._replace(times=use.times * n) for use, n in found.items()]

    def _uses_of_step(self, rows: int, last_rows: int, decoding: int = 0) -> list[Use]:
        """After the last layer's attention only ``last_rows`` rows go on, and through the head."""
        spec, shape, alone = self.spec, self.shape, self._takes_one_thread(rows, decoding)
        found, how = [], scheme_of(shape.scheme)
        others = Counter((name, scheme_of(held).native_product) for name, held in shape.others)
        kinds = dict.fromkeys(own for _, own in others)
        for matrices, layers in block_kinds(spec):
            n_last = 0 if last_rows == rows else layers.count(spec.n_layers - 1)
            for product in matrices:
                n_whole = len(layers) - (n_last if after_attention(product) else 0)
                for n_rows, those in ((rows, layers[:n_whole]), (last_rows, layers[n_whole:])):
                    apart = {own: sum(others[f"{layer}.{product.name}", own] for layer in those) for own in kinds}
                    found.append(_use(product, native_name(product, how), n_rows, len(those) - sum(apart.values()), alone))
                    found += [_use(product, own, n_rows, n, alone) for own, n in apart.items()]
        found.append(Use(head_matrix(spec), scheme_of(shape.head).native_product, last_rows, 1, alone))
        return [use for use in found if use.rows and use.times]

    def _working_set(self, phase: Phase) -> float:
        """Bytes that are read between two uses of a matrix, times ``crowding``: weights, adapters, and in a decode step the
        cache."""
        shape = self.shape
        rows = shape.batch if phase == "decode" else shape.prompt_tokens
        weights = native_reuse_bytes(self.spec, shape.scheme, shape.head, rows, shape.others)
        if shape.adapters:
            weights += read_bytes(self.spec, shape, shape.batch if phase == "decode" else 1)
        read = weights + self._cache_bytes() if phase == "decode" else weights
        return letter("crowding", self.hardware.native_rates.crowding) * read

    def _cache_bytes(self) -> float:
        read = self.shape.batch * _keys(self.spec, self.shape) * kv_bytes_per_token(self.cached, self.shape.cache_dtype)
        return named("step_cache_bytes", read, "bytes", "keys and values that a decode step attends to")

    def _around(self, phase: Phase, units: dict[str, float], flop: float, kv_bytes: float) -> list[Work]:
        """What surrounds the products, at the fitted prices."""

        def seconds(unit: str) -> float:
            if unit not in units:
                return 0.0
            return letter(f"n_{unit}", units[unit]) * letter(f"{unit}_s", self._price(phase, unit))

        def around(what: str, taken_s: float, source: str) -> float:
            source += "; fitted to whole steps of the engine, products taken off"
            return named(f"{what}_s", taken_s, "s", source, "measured")

        shares = elements_of(self.spec, 1)
        whole = letter("all_elements", sum(shares.values()))
        layers_s = around(
            "layers",
            seconds("element") + seconds("layer") + seconds("barrier"),
            "barriers, numbers that norms and activations pass",
        )
        works = [
            Work.limited(component, 0.0, 0.0, 0.0, 0.0, layers_s * letter("elements", count) / whole)
            for component, count in shares.items()
        ]
        reading_s = kv_bytes / self.hardware.bandwidth(self._working_set(phase))
        attention_s = largest(0.0, seconds("attention") + seconds("key") + seconds("far_key") + seconds("cached"))
        source = "attention: visible pairs or keys at their price, and what the cache's type adds, or reading"
        walking_s = around("walking", largest(attention_s, reading_s), source)
        works.append(Work("attention", flop, kv_bytes, attention_s, reading_s, 0.0, walking_s))
        sampling_s = around(
            "scheduling", seconds("step") + seconds("row") + seconds("logit"), "scheduling and sampling, rows handed on"
        )
        rows = self.shape.batch if phase == "decode" else 1
        choosing = choosing_s(self.shape, self.hardware, rows, self.spec.vocab_size) if self.shape.sampling else 0.0
        works.append(Work.limited("head", 0.0, 0.0, 0.0, 0.0, sampling_s + choosing))
        return works

    def _price(self, phase: Phase, unit: str) -> float:
        """Seconds of one of ``unit``, as fitted to whole steps (0 where the fit found none)."""
        if unit == "cached":
            mine = (phase, self.shape.cache_dtype)
            return next((row.more_s for row in self.hardware.native_rates.caches if (row.phase, row.dtype) == mine), 0.0)
        found = next((row for row in self.hardware.native_rates.prices if row.phase == phase), None)
        return 0.0 if found is None else float(getattr(found, f"{unit}_s"))


@lru_cache(maxsize=64)
def anchor_ratios(like: ServingShape, hardware: Hardware) -> Ratios:
    """Measured ÷ planned of the prompts of the two deeper models by (width, tokens), under the scheme of ``like``."""
    found: dict[tuple[int, int], float] = {}
    for anchor in PREFILL_ANCHORS:
        measured = anchor.measured_s(hardware.native_rates, like.scheme) if has_steps(like.scheme) else None
        if measured is not None and (anchor.width, anchor.n_layers) != SHALLOW:
            found[anchor.width, anchor.rows] = measured / total_seconds(anchored(anchor, like, hardware).as_planned("prefill"))
    return found


def anchored(anchor: NativeAnchor, like: ServingShape, hardware: Hardware) -> Native:
    """The engine in the anchor's own shape, as calibration runs it."""
    batch, prompt = (1, anchor.rows) if anchor.phase == "prefill" else (anchor.rows, anchor.context)
    shape = replace(like, prompt_tokens=prompt, output_tokens=1, batch=batch, in_server=False, kv_dtype=anchor.cache)
    return Native(anchor.spec, shape, hardware)
