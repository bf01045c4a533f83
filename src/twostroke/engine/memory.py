"""How much memory there is, and how much of it the KV cache takes."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_SHARE = 0.25
"""Share of the memory that is free after the weights were loaded which the KV cache may take by default."""


def available_bytes() -> int:
    """Memory this process may still take: what the system calls available, within the control group's limit if there is one."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return max(available, 0)


def default_pages(page_bytes: int, max_running: int, max_model_len: int, page_tokens: int, available: int) -> int:
    """Pages for ``max_running`` requests of full length, at most ``CACHE_SHARE`` of ``available`` bytes, at least one page."""
    wanted = max_running * -(-max_model_len // page_tokens)
    return max(1, min(wanted, int(CACHE_SHARE * available) // page_bytes))
