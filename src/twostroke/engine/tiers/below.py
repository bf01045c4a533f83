"""``BelowCache``: where pages are looked for that are not in the cache."""

from __future__ import annotations

from pathlib import Path

from twostroke.core import policy
from twostroke.core.engine_settings import EngineSettings
from twostroke.engine.tiers.disk import DiskTier, open_store
from twostroke.engine.tiers.images import PageImages
from twostroke.engine.tiers.load_times import PromptTimes
from twostroke.engine.tiers.received import ReceivedPages
from twostroke.engine.tiers.records import PageRecords
from twostroke.scheduling.scheduler import Scheduler


class BelowCache:
    """Pages that another engine has sent come first, then those on ``disk``. Both are None until something is there."""

    def __init__(self, scheduler: Scheduler, settings: EngineSettings) -> None:
        self.disk: DiskTier | None = None
        self._received: ReceivedPages | None = None
        self._scheduler, self._settings = scheduler, settings

    def open_disk(self, identity: bytes, images: PageImages, times: PromptTimes) -> DiskTier | None:
        """The pages of ``identity`` in ``kv_dir``, empty or with what an earlier engine left there. ``use`` puts them below the
        cache. Any thread may ask for it. Raises ConfigError for a folder that is of no use."""
        assert self._settings.kv_dir is not None
        config = self._scheduler.config
        most = self._settings.kv_dir_bytes or policy.KV_DIR_BYTES
        store = open_store(Path(self._settings.kv_dir), most, identity, config.page_tokens, images)
        if store is None:
            return None
        return DiskTier(store, self._scheduler.pool.tree, images, config.page_tokens, config.token_budget, times)

    def use(self, disk: DiskTier | None) -> None:
        """Look in ``disk`` from now on."""
        self.disk = self._scheduler.admission.lower = disk
        if self._received is not None:
            self._received.below, self._scheduler.admission.lower = disk, self._received

    def receive(self, images: PageImages) -> ReceivedPages:
        """Where pages of another engine are put. They are looked for from now on."""
        if self._received is None:
            self._received = ReceivedPages(PageRecords(self._scheduler.config.page_tokens, images.n_bytes), images)
            self.use(self.disk)
        return self._received

    def close(self) -> None:
        """Write the pages that wait to be written, and let another engine have the folder."""
        if self.disk is not None:
            self.disk.close()
            self.use(None)
