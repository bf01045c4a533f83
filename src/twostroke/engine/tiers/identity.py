"""The identity of keys and values: two engines of one identity compute the same bits for the same tokens."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from twostroke.core.errors import ConfigError
from twostroke.core.paths import digests_dir
from twostroke.core.private_folder import private_folder
from twostroke.engine.packed_cache import states_of_files
from twostroke.engine.tiers.images import PageImages
from twostroke.scheduling.request import Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import ScheduledStep

_MAX_FILES = 64


def weight_files(directory: Path) -> list[Path]:
    """``config.json`` and the weight files of ``directory``."""
    return [directory / "config.json", *sorted(directory.glob("*.safetensors"))]


def weights_digest(directory: Path) -> str:
    """sha256 over ``config.json`` and the weight files of ``directory``, hexadecimal. Raises OSError.

    Hashing takes half a second a GB, so the digest of files that have not changed since (by inode, size and times) is taken
    from ``$TWOSTROKE_HOME/digests``.
    """
    files = weight_files(directory)
    name = hashlib.sha256("\0".join(states_of_files(files)).encode(errors="surrogateescape")).hexdigest()[:32]
    with contextlib.suppress(OSError, ConfigError), private_folder(digests_dir()) as folder, folder.read(name) as stream:
        known = stream.read(65).decode(errors="replace")
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode(errors="surrogateescape"))
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    made = digest.hexdigest()
    with contextlib.suppress(OSError, ConfigError), private_folder(digests_dir(), create=True) as folder:
        for old, _ in folder.files(re.compile("[0-9a-f]{32}"))[: -_MAX_FILES + 1]:
            folder.remove(old)
        with folder.create(name) as stream:
            stream.write(made.encode())
    return made


def identity_of(
    weights: str,
    form: str,
    images: PageImages,
    scheduler: Scheduler,
    vocab_size: int,
    compute: Callable[[ScheduledStep], object],
) -> bytes:
    """32 bytes over the digest of the weights, what is said of the cache's ``form``, and the keys and values of a page of
    tokens drawn at random, which are computed for it.

    Computing them covers whatever decides the bits: weights' scheme, runner, kernels, the processor's instructions, rotary
    tables, the offset of an int8 cache's keys. Without it each would have to be listed, and a forgotten one would let an engine
    read what it cannot have computed. The tokens need a free slot and a page, which ``scheduler`` must have.
    """
    config, pool = scheduler.config, scheduler.pool
    n = min(config.page_tokens, config.token_budget, config.max_model_len)
    tokens = torch.randint(0, vocab_size, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    request = Request("identity", tokens, SamplingParams(max_tokens=1))
    pages = pool.allocate(1)
    assert pages is not None, "an idle engine has a page"
    request.pages, request.slot = pages, 0
    image = np.zeros(images.n_bytes, np.uint8)
    try:
        images.copy_in(pages[0], image)  # what stands behind the last token
        compute(ScheduledStep(0, [request], [n], [0], 0, [request], []))
        images.copy_out(pages[0], image)
    finally:
        pool.release(pages)
    return hashlib.blake2b(f"{weights}\0{form}\0".encode() + image.tobytes(), digest_size=32).digest()
