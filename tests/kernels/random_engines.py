"""Engines of random shape and damaged weights under requests of every kind, three in ten of them cancelled.

test_random_engines.py calls ``run`` and ``race``. As a program it does the same with another build of the library::

    python tests/kernels/random_engines.py LIBRARY engines SEED ENGINES THREADS
    python tests/kernels/random_engines.py LIBRARY race REGIONS
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from small_models import lively
from twostroke.core.engine_settings import EngineSettings
from twostroke.core.errors import CapacityError, ConfigError, InputError
from twostroke.core.schemes import CACHE_TYPES, WEIGHTS
from twostroke.core.spec import ModelSpec
from twostroke.engine import native_sampling
from twostroke.engine.core import EngineCore
from twostroke.engine.kv_pool import token_bytes
from twostroke.kernels import native_library
from twostroke.model.decoder import Decoder
from twostroke.model.save import save_model
from twostroke.scheduling.sampling_params import SamplingParams

DAMAGES = (None, None, None, float("nan"), float("inf"), 1e18, 0.0)


def random_spec(r: random.Random) -> ModelSpec:
    """Head dimensions of 2 to 130, vocabularies of 2 to 3,001, widths of 1 to 129: whole vectors and the sizes beside them."""
    family = r.choice(("llama", "mistral", "qwen2", "qwen3", "gpt2"))
    n_kv_heads = r.randint(1, 3)
    n_heads = n_kv_heads if family == "gpt2" else n_kv_heads * r.randint(1, 4)
    head_dim = r.choice((2, 4, 6, 8, 14, 16, 18, 30, 32, 34, 62, 64, 66, 96, 126, 128, 130))
    if family == "gpt2":
        head_dim = r.choice((2, 3, 5, 7, 15, 16, 17, 31, 33, 43))
    window = {"mistral": r.choice((1, 2, 11, 15, 16, 17, 60, 200)), "qwen2": r.choice((1, 9, 33))}.get(family)
    n_layers = r.randint(1, 3)
    width = r.choice((1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 129))
    if family == "gpt2":
        width = n_heads * head_dim
    elif family == "llama":  # must be whole heads, of whatever size
        width = max(1, width // n_heads) * n_heads
    more: dict[str, Any] = {"qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    if family == "gpt2":
        more = {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "activation": "gelu_tanh", "tied_embeddings": True}
        more |= {"qkv_bias": True, "attn_out_bias": True, "mlp_bias": True}
    return ModelSpec(
        family=family,
        vocab_size=r.choice((2, 3, 16, 17, 63, 65, 97, 500, 1000, 3001)),
        n_layers=n_layers,
        d_model=width,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=4 * n_heads * head_dim if family == "gpt2" else r.choice((1, 3, 16, 31, 32, 33, 80, 127, 129)),
        max_positions=600,
        eos_token_ids=(1,),
        bos_token_id=0,
        sliding_window=window,
        sliding_window_layers=(n_layers - 1,) if family == "qwen2" else None,
        **more,
    )


def damage(decoder: Decoder, r: random.Random) -> None:
    value = r.choice(DAMAGES)
    if value is None:
        return
    with torch.no_grad():
        parameter = r.choice(list(decoder.parameters()))
        rows = parameter.view(parameter.shape[0], -1)
        for _ in range(r.randint(1, 3)):
            rows[r.randrange(rows.shape[0]), r.randrange(rows.shape[1])] = value


def random_engine(r: random.Random, folder: Path, n_threads: int) -> EngineCore:
    decoder = lively(Decoder(random_spec(r)), seed=r.randrange(1000))
    damage(decoder, r)
    directory = save_model(decoder, decoder.spec, folder, dtype="fp32")
    page_tokens, max_running = r.choice((1, 2, 5, 7, 15, 16, 17, 31, 32, 48)), r.randint(1, 6)
    kv_dtype = r.choice(CACHE_TYPES)
    n_pages = -(-r.choice((60, 150, 300, 900)) // page_tokens)
    config = EngineSettings(
        dtype=r.choice(WEIGHTS),
        head_dtype=r.choice(("auto", *WEIGHTS)),
        kv_dtype=kv_dtype,
        runner="native",
        n_threads=n_threads,
        page_tokens=page_tokens,
        max_running=max_running,
        token_budget=r.choice((max_running, 16, 60, 200)),
        kv_cache_bytes=token_bytes(decoder.spec, kv_dtype) * page_tokens * n_pages,
        max_model_len=min(550, n_pages * page_tokens),
    )
    return EngineCore(directory, config)


def random_params(r: random.Random, n_vocab: int) -> SamplingParams:
    some = [r.randrange(n_vocab) for _ in range(3)]
    return SamplingParams(
        temperature=r.choice((0.0, 0.0, 1e-30, 1e-3, 1.0, 100.0)),
        top_k=r.choice((0, 0, 1, 5, n_vocab - 1, n_vocab, n_vocab + 1, 2**31)),
        top_p=r.choice((1.0, 1.0, 0.9, 1e-9, 1 - 1e-9)),
        min_p=r.choice((0.0, 0.0, 0.1, 1.0)),
        max_tokens=r.choice((1, 3, 20)),
        min_tokens=r.choice((0, 0, 1)),
        stop_token_ids=tuple(some[:1]) if r.random() < 0.3 else (),
        ignore_eos=r.random() < 0.5,
        logprobs=r.choice((None, 0, 1, 20)),
        prompt_logprobs=r.choice((None, None, 0, 1, 20)),
        repetition_penalty=r.choice((1.0, 1.0, 0.01, 100.0)),
        presence_penalty=r.choice((0.0, 0.0, -100.0, 100.0)),
        frequency_penalty=r.choice((0.0, 0.0, -100.0, 100.0)),
        logit_bias=tuple((token, r.choice((-100.0, 100.0))) for token in dict.fromkeys(some)) if r.random() < 0.3 else (),
        n=r.choice((1, 1, 1, 3)),
    )


def exercise(core: EngineCore, r: random.Random) -> Counter[str]:
    """Some requests through ``core``; how they ended. Every page must be free then."""
    n_vocab, found = core.spec.vocab_size, Counter[str]()
    shared = [r.randrange(n_vocab) for _ in range(r.choice((5, 16, 40)))]
    for i in range(8):
        own = [r.randrange(n_vocab) for _ in range(r.choice((1, 2, 15, 17, 60, 60, 400)))]
        try:
            core.add_request(f"r{i}", shared + own if r.random() < 0.4 else own, random_params(r, n_vocab))
        except CapacityError:
            found["too long"] += 1
        for _ in range(r.choice((0, 1, 3))):
            found.update(event.finish_reason for event in core.step() if event.finish_reason is not None)
        if r.random() < 0.3:
            core.abort(f"r{r.randint(0, i)}")
    while core.has_work:
        found.update(event.finish_reason for event in core.step() if event.finish_reason is not None)
    pages, stats = core.scheduler.pool, core.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert pages.n_free == core.scheduler.config.n_pages, "a page was not given back"
    return found


def run(seed: int, n_engines: int, n_threads: int) -> Counter[str]:
    """``n_engines`` of them, each on one of the targets that hold here. How engines and requests ended."""
    found = Counter[str]()
    before = native_library.target()
    try:
        for i in range(n_engines):
            r = random.Random(f"{seed} {i}")
            target = r.choice(native_library.holding())
            native_library.set_target(target)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    core = random_engine(r, Path(folder) / "m", n_threads)
                except (ConfigError, InputError) as error:
                    found[f"refused: {error}"] += 1
                    continue
                found += exercise(core, r)
                found[target] += 1
    finally:
        native_library.set_target(before)
    return found


def race(n_regions: int) -> None:
    """Two callers of the pool, who draw and rank tokens in between, while a third changes the number of its threads."""
    library = native_library.library()
    assert library is not None
    logits = torch.randn((6, 3001), generator=torch.Generator().manual_seed(0))
    wrong: list[int] = []

    def caller() -> None:
        expected = native_sampling.top(logits, range(6), 5)[2].tolist()
        for i in range(n_regions // 2):
            library.ts_barrier_seconds(3)
            if native_sampling.top(logits, range(6), 5, n_threads=2)[2].tolist() != expected:
                wrong.append(i)

    callers = [threading.Thread(target=caller) for _ in range(2)]
    for thread in callers:
        thread.start()
    sizes = itertools.cycle((1, 4, 2, 3))
    while any(thread.is_alive() for thread in callers):
        library.ts_set_threads(next(sizes))
        time.sleep(0.001)
    for thread in callers:
        thread.join()
    library.ts_set_threads(2)
    assert wrong == []


def main(library: str, what: str, *numbers: str) -> None:
    native_library.PATH = Path(library)
    if native_library.library() is None:
        raise SystemExit(native_library.why_absent())
    print(dict(run(*map(int, numbers))) if what == "engines" else race(*map(int, numbers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
