"""A conversation's keys and values in one file: its pages in order, of which the last may be filled in part."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from twostroke.core.aside import file_beside
from twostroke.core.errors import CapacityError, ConfigError, CorruptFileError, EngineError, InputError
from twostroke.engine.tiers.images import PageImages
from twostroke.engine.tiers.page_file import PageFile
from twostroke.scheduling.prefix_tree import ROOT, chain_key
from twostroke.scheduling.scheduler import Scheduler


def save(path: Path, tokens: list[int], identity: bytes, scheduler: Scheduler, images: PageImages) -> None:
    """Write ``tokens`` and their pages, which must be in the prefix tree, to ``path``: at once or not at all.

    Raises EngineError if one is missing, and InputError if the file cannot be written.
    """
    page_tokens = scheduler.config.page_tokens
    try:
        with file_beside(path) as aside:
            descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.closing(PageFile(descriptor, identity, page_tokens, images.n_bytes)) as file:
                file.begin()
                key, record = ROOT, file.records.record()
                for slot, held in enumerate(scheduler.page_lists.keys_of(tokens)[1:]):
                    own = tokens[slot * page_tokens : (slot + 1) * page_tokens]
                    found = scheduler.pool.tree.held(held)
                    if found is None or found[1] != own:
                        raise EngineError(
                            "not all keys and values of the conversation are in the cache: the model's output is not "
                            "finite, or the cache is too small."
                        )
                    images.copy_out(found[0], file.records.image(record))
                    file.records.set_tokens(record, own)
                    key = chain_key(key, own)
                    file.write(slot, key, len(tokens), record)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}. Name another file.") from None


def load(path: Path, identity: bytes, scheduler: Scheduler, images: PageImages) -> list[int]:
    """Put the pages of ``path`` into the pool, where the prefix tree finds them, and return the session's tokens.

    Raises InputError, ConfigError, CorruptFileError or CapacityError; then nothing of it can be found.
    """
    config, pool = scheduler.config, scheduler.pool
    size = config.page_tokens
    most = -(-config.max_model_len // size)
    tokens: list[int] = []
    pages: list[int] = []
    try:
        with contextlib.closing(PageFile(_open(path), identity, size, images.n_bytes)) as file:
            try:
                file.check()
            except (ConfigError, CorruptFileError) as error:
                raise type(error)(f"{path} cannot be loaded: {error}. Save the session again with this model.") from None
            entries = file.entries(most + 1)
            if len(entries) > most:
                raise CapacityError(f"{path} holds more than max_model_len={config.max_model_len} tokens. Raise it.")
            key, record = ROOT, file.records.record()
            for slot, entry in enumerate(entries):
                own = file.records.tokens(record) if entry is not None and file.read(slot, entry, record).whole else []
                key = chain_key(key, own)
                whole = len(own) == size
                if entry is None or not own or entry.key != key or not (whole or slot == len(entries) - 1):
                    raise _damaged(path)
                tokens += own
                page = pool.allocate(1, after=pages[-1] if pages else -1)
                if page is None:
                    raise CapacityError(
                        f"{path} holds more tokens than the {config.n_pages} pages of the KV cache. Raise kv_cache_bytes."
                    )
                pages += page
                images.copy_in(page[0], file.records.image(record))
            if not entries or entries[0] is None or entries[0].used != len(tokens):
                raise _damaged(path)
        keys = scheduler.page_lists.keys_of(tokens)
        for i, page_of in enumerate(pages):
            pool.tree.insert(keys[i + 1], tokens[i * size : (i + 1) * size], page_of, keys[i])
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    finally:
        pool.release(pages)
    return tokens


def _damaged(path: Path) -> CorruptFileError:
    return CorruptFileError(f"{path} is damaged or incomplete. Save the session again.")


def _open(path: Path) -> int:
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise InputError(f"{path} is not a file.")
    return opened
