"""``EngineCore``: a model, a scheduler and a KV cache. The caller owns the loop and advances them one step at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twostroke.core import policy
from twostroke.core.contention import looking
from twostroke.core.crossovers import Crossovers
from twostroke.core.engine_settings import DRAFT, OFF, EngineSettings
from twostroke.core.errors import ConfigError, EngineError, InputError
from twostroke.core.fitted_exits import check_exits
from twostroke.core.heap import return_freed_memory
from twostroke.core.paths import model_directory
from twostroke.core.policy import logits_bytes
from twostroke.core.profile import load_profile
from twostroke.core.schemes import CACHES, scheme_of
from twostroke.engine.adapters import AdapterStore
from twostroke.engine.beam_choice import BeamChooser, Chosen
from twostroke.engine.early_exit import UNPLANNED, EarlyExits
from twostroke.engine.events import Answers, TokenEvent
from twostroke.engine.first_layers import FirstLayers
from twostroke.engine.grammars import Grammars
from twostroke.engine.key_offset import centre_keys
from twostroke.engine.kv_pool import KVPool, token_bytes
from twostroke.engine.limits import scheduler_limits
from twostroke.engine.lineage import Lineage
from twostroke.engine.loading import load, lowered
from twostroke.engine.memory import held_bytes
from twostroke.engine.meters import EngineStats, StepMeter
from twostroke.engine.native_runner import NativeRunner
from twostroke.engine.planned import planned_pace
from twostroke.engine.pooling import PooledStates
from twostroke.engine.prompt_scores import PromptScores, rows_of
from twostroke.engine.speculation.draft_model import ModelDrafter
from twostroke.engine.speculation.drafter import Drafter
from twostroke.engine.speculation.drafting import AnyDrafter, Drafting
from twostroke.engine.speculation.early_exit import UNTRAINED, ExitDrafter, RepeatsOrExits, exit_layers
from twostroke.engine.speculation.forced import ForcedDrafts
from twostroke.engine.speculation.lengths import StepTimes
from twostroke.engine.speculation.times import planned_prompt_s, planned_step_s, timed_step_s
from twostroke.engine.step_counter import StepCounter
from twostroke.engine.threads import default_threads, place_threads
from twostroke.engine.tiers import session
from twostroke.engine.tiers.below import BelowCache
from twostroke.engine.tiers.identity import identity_of
from twostroke.engine.tiers.load_times import PromptTimes
from twostroke.engine.tiers.received import ReceivedPages
from twostroke.engine.tiled_kv_pool import TiledKVPool
from twostroke.engine.torch_runner import TorchRunner
from twostroke.engine.verification import Taken, verify
from twostroke.engine.ways import checks_drafts, exits_of, runs_natively
from twostroke.engine.weights import (
    Asleep,
    Generations,
    Prepared,
    Served,
    centres_keys,
    fingerprint_of,
    form_of,
    let_go,
    make_runner,
    prepare,
)
from twostroke.kernels.native_library import library
from twostroke.scheduling.request import FinishReason, Request
from twostroke.scheduling.sampling_params import SamplingParams
from twostroke.scheduling.scheduler import Scheduler
from twostroke.scheduling.step import ScheduledStep


class WeightsChange(NamedTuple):
    """``pause_s``: seconds in which the engine computed nothing. ``finishing`` requests go on with the weights before."""

    fingerprint: str
    prepare_s: float
    pause_s: float
    finishing: int


class EngineCore:
    """Continuous batching over one model. Call ``step`` while ``has_work``; nothing runs between the calls.

    Raises InputError, ConfigError or CorruptFileError if the directory is not a usable model, and CapacityError if weights or
    cache do not fit in memory.
    """

    def __init__(self, model_dir: Path | str, settings: EngineSettings | None = None) -> None:
        began = time.perf_counter()
        self.settings = settings or EngineSettings()
        self.n_threads = self.settings.n_threads or default_threads()
        self._others, self._left = looking(), self.n_threads
        torch.set_num_threads(self.n_threads)
        place_threads(self.settings, self.n_threads)
        native = runs_natively(self.settings)
        loaded = load(Path(model_dir), self.settings.dtype, native)
        self._lineage = Lineage(loaded.directory)
        profile = load_profile("serve")
        crossovers = profile.crossovers if profile else Crossovers()
        self.spec = loaded.spec
        drafts = checks_drafts(self.settings, native)
        exits = exits_of(Path(model_dir), loaded, self.settings, native)
        self._exit_layers = exit_layers(loaded.spec, self.settings.speculate) if drafts else None
        if self._exit_layers is not None and not self.spec.early_exit:
            self.spec = self.spec.with_(notes=(*self.spec.notes, UNTRAINED))
        self.plan, self.loaded_packed = lowered(loaded, self.settings, native, crossovers)
        directory, quantised = loaded.directory, loaded.quantised
        del loaded  # the plan has its own copies of the matrices: together with the state they would take memory twice
        kv_dtype = self.settings.kv_dtype
        if kv_dtype == "auto":
            kv_dtype = scheme_of(self.plan.weights).kept
        # Only now: the default cache is a share of the memory that the weights have left.
        scheduler_config = scheduler_limits(self.spec, self.settings, kv_dtype, policy.DRAFT_ROWS if drafts else 0)
        if exits is not None:  # rows that leave early write other keys and values than a prompt's
            scheduler_config = replace(scheduler_config, cached_outputs=False)
        budget = self.settings.lora_memory_bytes or policy.ADAPTER_MEMORY_BYTES
        element = scheme_of(self.plan.weights).adapter_element(native)
        self.adapters = AdapterStore(self.plan, directory, budget, lambda parts: self._runner.hold(parts), element, quantised)
        pace = planned_pace(directory, self.spec, self.settings, scheduler_config)
        self.scheduler = Scheduler(scheduler_config, adapters=self.adapters, pace=pace)
        # Only the tiled pool has scales, so a cache in codes takes it under the torch runner as well.
        make_pool = TiledKVPool if native or CACHES[kv_dtype].scaled else KVPool
        pool = make_pool(self.spec, scheduler_config.n_pages, scheduler_config.page_tokens, kv_dtype)
        self.pool: KVPool | TiledKVPool = pool
        self._native = native
        self._runner: NativeRunner | TorchRunner | Generations | Asleep = make_runner(self.plan, pool, scheduler_config, native)
        self.exits: EarlyExits | None = None
        if exits is not None:
            self.leave_after(*exits)
            self.spec = self.spec.with_(notes=(*self.spec.notes, UNPLANNED))
        self._answers = Answers()
        self._prompt_scores = PromptScores()
        self._pooled = PooledStates()
        self._beams = BeamChooser(self.spec, directory)
        self._grammars = Grammars(directory, self.spec)
        self._meter = StepMeter(self.spec, self.plan.step_bytes, token_bytes(self.spec, kv_dtype))
        self._counter = StepCounter(self._meter, self.plan.expert_bytes, scheduler_config.n_pages)
        if centres_keys(self.spec, pool):  # after the runner is there: it computes a prefill
            assert isinstance(pool, TiledKVPool)
            centre_keys(pool, self.scheduler, self.spec.vocab_size, self.compute)
        self._first_layers: FirstLayers | None = None
        self._drafting = Drafting(self.scheduler, self._grammars)
        if drafts:
            times = self.step_times(Path(model_dir))
            self._drafting.drafter, self._drafting.forced = self._make_drafter(Path(model_dir), times), ForcedDrafts(times)
        self._below = BelowCache(self.scheduler, self.settings)
        if self.settings.kv_dir is not None:
            self._below.use(self._below.open_disk(self.identity, pool.images(), self._prompt_times(Path(model_dir))))
        native_library = library()
        self.huge_page_bytes = 0
        """Bytes that ``huge_pages`` on has put into large pages at the start."""
        if self.settings.huge_pages == "on" and native_library is not None:
            self.huge_page_bytes = native_library.ts_collapse()
        self.load_s = time.perf_counter() - began

    def _make_drafter(self, directory: Path, times: StepTimes) -> AnyDrafter:
        if not self.settings.speculate.startswith(DRAFT):
            exits = None if self._exit_layers is None else self._make_exits(self._exit_layers, times)
            if exits is not None and self.settings.speculate != "auto":
                return exits
            repeats = Drafter(self.spec.vocab_size, times, not self.settings.separate_prefixes)
            return repeats if exits is None else RepeatsOrExits(repeats, exits)
        path = model_directory(Path(self.settings.speculate.removeprefix(DRAFT)))
        own = replace(
            self.settings, speculate=OFF, dtype="auto", max_model_len=None, kv_cache_bytes=None, kv_dir=None, max_step_ratio=OFF
        )
        draft = EngineCore(path, own)
        if draft.spec.vocab_size != self.spec.vocab_size:
            raise ConfigError(
                f"the draft model {path} has a vocabulary of {draft.spec.vocab_size} tokens, and {directory} one of "
                f"{self.spec.vocab_size}. Use a model with the same tokenizer."
            )
        return ModelDrafter(draft, times, draft.step_times(path), self._answers.seed_of)

    def _make_exits(self, layers: int, times: StepTimes) -> ExitDrafter:
        assert isinstance(self._runner, NativeRunner)
        plan, config = self.plan.first(layers), self.scheduler.config
        first = NativeRunner(plan, self._runner.pool, config, self._runner)
        self._first_layers = FirstLayers(first, self.threads_for)
        share = plan.step_bytes / self.plan.step_bytes
        draft_times = StepTimes(lambda rows: share * times.seconds(rows), config.max_running)
        return ExitDrafter(self._first_layers.compute, times, draft_times, self.scheduler.reserve, self._answers.seed_of)

    def receive_pages(self) -> ReceivedPages:
        """Where pages are put that an engine of the same identity has computed: a request that has their keys loads them."""
        return self._below.receive(self.pool.images())

    def leave_after(self, layers: Sequence[int], threshold: float) -> None:
        """Let rows leave after ``layers`` from now on. The engine must be idle, and ``early_exit`` must not be off."""
        self._must_be_idle()
        assert isinstance(self._runner, NativeRunner)
        assert self.settings.early_exit != OFF
        check_exits(tuple(layers), self.spec.n_layers)
        if self.exits is not None and self.exits.layers == tuple(layers):
            self.exits.threshold = threshold
        else:
            self.exits = EarlyExits(self._runner, self.scheduler.config, layers, threshold)

    @property
    def identity(self) -> bytes:
        """Of the keys and values that this engine computes: another of the same identity computes the same bits. The engine
        must be idle when it is first asked for."""
        if self._lineage.identity is None:
            digest = self._lineage.look()
            arguments = (form_of(self.pool), self.pool.images(), self.scheduler, self.spec.vocab_size, self.compute)
            self._lineage.identity = identity_of(digest, *arguments)
        return self._lineage.identity

    @property
    def fingerprint(self) -> str:
        """A short name of the weights and of how this engine computes: answers of engines with the same one are comparable. The
        engine must be idle when it is first asked for."""
        exits = "" if self.exits is None else f"{self.exits.layers} {self.exits.threshold}"
        return fingerprint_of(self.identity + exits.encode(), self.settings)

    def prepare_weights(self, directory: Path | str) -> Prepared | None:
        """Read and pack other weights of the same shape, while the engine goes on. None: they are served already. One thread
        at a time may, beside steps; its priority falls. Raises DataError, ConfigError, CorruptFileError or CapacityError, and
        leaves the engine as it was."""
        self._must_be_replaceable()
        served = Served(
            self.directory, self.spec, self.plan, self.settings, self.scheduler.config, self.pool, self._native,
            self._exit_layers,
        )  # fmt: skip
        self._lineage.look_unless_changed()
        prepared = prepare(model_directory(directory), served, None if self.is_empty else self._lineage.digest)
        disk = self._below.disk
        if prepared is not None and disk is not None and prepared.identity != self._lineage.identity:
            prepared.disk = self._below.open_disk(prepared.identity, self.pool.images(), disk.times)
        return prepared

    def sleep(self, level: int) -> int:
        """Give memory back to the system until the engine wakes: at level 1 that of the KV cache, with all that is in it, at
        level 2 that of the weights too. Returns how many bytes. Raises InputError if requests are under way, or for level 2
        ConfigError if adapters are loaded, whose form depends on the weights."""
        if self.has_work:
            raise InputError("requests are under way. Let the engine sleep when they have ended.")
        if level > 1:
            self._must_be_replaceable()
        before, pool = held_bytes(), self.scheduler.pool
        pool.discard_content(range(pool.n_pages))
        self.pool.forget()
        if level > 1 and not self.is_empty:
            _ = self.identity  # which cannot be computed without weights
            self.plan, self._runner = replace(self.plan, ops=()), Asleep()
            if self._first_layers is not None:
                self._first_layers.runner = None
            self.adapters.rebase(self.plan, self.directory, self.adapters.quantised)  # it held the plan as well
        return_freed_memory()
        return max(0, before - held_bytes())

    @property
    def weights_key(self) -> bytes:
        """The name of the present weights in the keys of their pages: empty for those that the engine began with."""
        return self.scheduler.page_lists.weights

    @property
    def is_empty(self) -> bool:
        """Whether the engine sleeps without weights. Then it wakes by ``prepare_weights(directory)`` and ``use_weights``."""
        return isinstance(self._runner, Asleep)

    @property
    def directory(self) -> Path:
        """Where its weights come from."""
        return self._lineage.directory

    def _must_be_replaceable(self) -> None:
        """Raises ConfigError if something is in use that was made for the present weights."""
        if self.exits is not None:
            raise ConfigError(
                f"early_exit={self.settings.early_exit!r} was fitted to the weights that are served, so they cannot be "
                "replaced or taken out of memory. Use early_exit='off' for that."
            )
        if self.adapters.known or self.adapters.n_held:
            raise ConfigError(
                "adapters are loaded, which were made for the weights that are served. Unload them first, and wait until "
                "requests that use them have ended."
            )

    def use_weights(self, prepared: Prepared, carry_on: bool = False) -> WeightsChange:
        """Compute with ``prepared`` from the next step on. Requests under way finish on the weights they began with, or with
        ``carry_on`` their tokens are computed again by the new ones, which go on. Pages of the prefix cache are found only by
        requests of the weights that computed them. Raises ConfigError if adapters were loaded meanwhile."""
        began = time.perf_counter()
        self._must_be_replaceable()
        lists = self.scheduler.page_lists
        key, fingerprints = self._lineage.key_of(prepared), self._answers.fingerprints
        if not fingerprints and self._lineage.identity is not None:
            fingerprints[lists.weights] = self.fingerprint
        runners = dict(self._runner.runners) if isinstance(self._runner, Generations) else {}
        if isinstance(self._runner, NativeRunner | TorchRunner):
            runners = {lists.weights: self._runner}
        runners.setdefault(key, prepared.runner)  # requests may still run on the same weights
        unused: list[Any] = [self.plan]
        self.scheduler.change_weights(key, carry_on)
        self._runner = Generations(runners, key)
        self.plan = self._runner.runner.plan
        if self._first_layers is not None:
            unused.append(self._first_layers.runner)
            self._first_layers.runner = prepared.exits
        if isinstance(prepared.pool, TiledKVPool):
            prepared.pool.poisoned = self.pool.poisoned
            self.pool = prepared.pool
        before, is_same = self._below.disk, prepared.identity == self._lineage.identity
        counts = self._counter.stats
        counts.weight_changes += prepared.digest != self._lineage.digest
        self._lineage.take(prepared)
        fingerprints[key] = self.fingerprint
        self.adapters.rebase(self.plan, prepared.directory, prepared.quantised)
        if not is_same:
            self._below.use(prepared.disk)
        n_left = self._let_go(unused, None if is_same or before is None else before.close)
        counts.weight_pause_s = time.perf_counter() - began
        return WeightsChange(fingerprints[key], prepared.seconds, counts.weight_pause_s, n_left)

    def _let_go(self, unused: list[Any], finish: Callable[[], None] | None = None) -> int:
        """Drop the weights that no request is computed by any more, and ``unused``. Returns how many requests are still
        computed by weights that were replaced."""
        assert isinstance(self._runner, Generations)
        current = self._runner.current
        left = Counter(request.weights for request in self.scheduler.requests.values())
        unused += [self._runner.runners.pop(key) for key in self._runner.runners.keys() - left.keys() - {current}]
        if len(self._runner.runners) == 1:
            self._runner = self._runner.runner
        if unused:
            let_go(unused, finish)
        return left.total() - left[current]

    def close(self) -> None:
        """Write the pages that wait to be written to ``kv_dir``, and let another engine have it. Does nothing without one; the
        end of the process does the same."""
        self._below.close()

    def save_session(self, path: Path, token_ids: Sequence[int]) -> None:
        """Save the keys and values of a conversation to ``path``, in the place of a file that is there. Those that the cache
        has lost are computed for it.

        Raises InputError if requests are under way or the file cannot be written, what ``add_request`` raises, and EngineError
        if the model's output is not finite. Then ``path`` is as it was.
        """
        self._must_be_idle()
        self.add_request("session", token_ids, SamplingParams(max_tokens=1, temperature=0.0))
        while self.has_work:
            self.step()
        session.save(Path(path), list(token_ids), self.identity, self.scheduler, self.pool.images())

    def load_session(self, path: Path) -> list[int]:
        """Put the keys and values of a saved conversation into the cache. Returns its tokens: a prompt that begins with them
        finds them, but for less than a quarter of a page.

        Raises InputError if requests are under way or the file cannot be read, ConfigError if another model wrote it,
        CorruptFileError if it is damaged and CapacityError if the cache is too small. Then nothing of it can be found.
        """
        self._must_be_idle()
        return session.load(Path(path), self.identity, self.scheduler, self.pool.images())

    def _must_be_idle(self) -> None:
        if self.has_work:
            raise InputError("requests are under way. Save and load sessions once they have ended.")

    def step_times(self, directory: Path) -> StepTimes:
        """Seconds of this engine's steps by their rows, each of a request that decodes. The engine must be idle."""
        config = self.scheduler.config
        most = min(config.token_budget, config.max_running + config.draft_rows)
        predict = planned_step_s(directory, self.spec, self.settings)
        return StepTimes(predict or timed_step_s(self.scheduler, self.compute, most), most)

    def _prompt_times(self, directory: Path) -> PromptTimes:
        """Seconds of this engine's steps by their rows, all of one prompt: the last alone is given logits."""
        most = self.scheduler.config.token_budget
        predict = planned_prompt_s(directory, self.spec, self.settings)
        if predict is None:
            predict = timed_step_s(self.scheduler, lambda step, rows: self.compute(step, rows[-1:]), most)
        return PromptTimes(StepTimes(predict, most))

    @property
    def dtype(self) -> str:
        """Name of the format in which the blocks' matrices are held."""
        return self.plan.weights

    @property
    def runner(self) -> str:
        """Which runner computes the steps: native or torch."""
        return "native" if self._native else "torch"

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.scheduler.config.max_model_len

    @property
    def weights_bytes(self) -> int:
        return 0 if self.is_empty else self.plan.weights_bytes

    @property
    def kv_cache_bytes(self) -> int:
        return self.pool.n_bytes

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        client: str = "",
        timeout_s: float | None = None,
        lora: str | None = None,
    ) -> None:
        """Queue a request, for the model with the adapter ``lora`` if one is named. ``step`` returns its tokens. Its
        ``params.n`` answers share one computation of the prompt.

        A lower ``priority`` goes first. Requests of one ``client`` do not delay those of another. A request that is unfinished
        ``timeout_s`` seconds from now ends. Raises InputError (empty prompt, unknown token or adapter, id in use, impossible
        timeout), CapacityError (the request can never fit) or what ``prepare`` raises, and leaves the engine as it was.
        """
        # By type, because True is an instance of int. 10,000 ids take 0.2 ms so, and 0.6 in a Python loop.
        if not set(map(type, prompt_ids)) <= {int}:
            raise InputError("the prompt must be a list of token ids, whole numbers.")
        least, most = min(prompt_ids, default=0), max(prompt_ids, default=0)
        if least < 0 or most >= self.spec.vocab_size:
            bad = least if least < 0 else most
            raise InputError(f"prompt token {bad} is not in the model's vocabulary of {self.spec.vocab_size}.")
        if timeout_s is not None and not 0 < timeout_s < float("inf"):
            raise InputError(f"timeout_s={timeout_s} must be a number of seconds above 0.")
        if self.is_empty:
            raise EngineError("the engine is asleep and holds no weights. Wake it first.")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        adapter = None if lora is None else self.adapters.get(lora)
        if params.use_beam_search:
            if self.exits is not None:
                raise InputError(
                    f"beam search compares sequences by probabilities, and early_exit={self.settings.early_exit!r} takes those "
                    "of different layers. Use early_exit='off' for it."
                )
            self._beams.check(params)
        original: Request | None = None
        for i in range(1 if params.use_beam_search else params.n):
            own = params if i == 0 else params.of_fork(i)
            name = request_id if i == 0 else f"{request_id}\x1f{i}"  # to the scheduler each answer is a request
            eos = self.spec.eos_token_ids
            request = Request(name, prompt_ids, own, priority, eos, client, deadline, original, adapter)
            if params.constraint is not None:
                self._grammars.begin(request, params.constraint)
            self.scheduler.add(request)  # raises for the first answer or for none, because all ask for the same
            self._answers.open(name, request_id, i, own)
            if own.pooling is not None:
                self._pooled.open(name)
            original = original or request

    def prepare(self, params: SamplingParams) -> None:
        """Compile what a request of ``params`` would wait for: its ``constraint``. Any thread may, beside steps. Raises
        InputError if it cannot be used, DataError if the model's tokenizer cannot, and ConfigError without llguidance."""
        if params.constraint is not None:
            self._grammars.compile(params.constraint)

    def load_adapter(self, name: str, directory: Path | str) -> bytes:
        """Let requests name the adapter in ``directory``. Returns its key. Raises ConfigError with early exit, and what
        ``AdapterStore.add`` raises."""
        if self.exits is not None:
            raise ConfigError(
                f"early_exit={self.settings.early_exit!r} does not go with adapters: how sure the model must be at an exit was "
                "fitted without them. Use early_exit='off', or merge the adapter into the model (`twostroke export`)."
            )
        return self.adapters.add(name, directory).key

    def unload_adapter(self, name: str) -> None:
        """Let no further request name it; those under way are finished. Raises InputError for an unknown name."""
        self.adapters.remove(name)

    def watch_blocks(self) -> list[bytes]:
        """Keys of the pages of prefixes that can be found. From here on `changed_blocks` returns what changes."""
        return self.scheduler.pool.tree.watch()

    def changed_blocks(self) -> dict[bytes, bool]:
        """Keys of pages that were stored (true) or removed since the last call."""
        return self.scheduler.pool.tree.changes()

    def described_block(self, key: bytes) -> tuple[bytes, list[int], str | None] | None:
        """Of a full page that is known by ``key``: the key before it, its tokens, and if it begins a prefix the name of its
        adapter, "" for none. None of a page that is gone or filled in part."""
        found = self.scheduler.pool.tree.described(key)
        return found if found is not None and len(found[1]) == self.scheduler.config.page_tokens else None

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Cancel a request, or one of its answers: it has no further events, and its pages are free. Ignores unknown ids."""
        for name in self._answers.names_of.get(request_id, [])[:]:
            # Of a beam search the first answer stands for all.
            if index is None or self._answers.of_name[name].index == index:
                request = self.scheduler.abort(name)
                if request is not None:
                    self._remember(request)
                self._forget(name)

    def _remember(self, request: Request) -> None:
        """Tell the drafter that it has ended: its output may be a draft of later ones, and an abort is mostly a stop string."""
        if self._drafting.drafter is not None and request.params.pooling is None:
            self._drafting.drafter.ended(request)

    def _forget(self, name: str) -> None:
        self._answers.forget(name)
        self._prompt_scores.forget(name)
        self._pooled.forget(name)

    def step(self) -> list[TokenEvent]:
        """Compute one step and return its events: at most one for each running answer, of one token or, where drafts were
        right, of several.

        If an exception interrupts the step, every request is as it was before.
        """
        events: list[TokenEvent] = []
        for request in self.scheduler.expire(time.monotonic()):
            events += self._timed_out(request)
        if not self.scheduler.has_work:
            return events
        began = time.perf_counter()
        step = self.scheduler.schedule(None if self._drafting.drafter is None else self._drafting.propose)
        searching, answers = self.scheduler.searching, self._answers.of_name
        self._left = self.n_threads if self.settings.n_threads is not None else self._others.left(self.n_threads)
        n_threads = self.threads_for(step)
        if n_threads != self.n_threads:
            torch.set_num_threads(n_threads)  # for torch's operators, those of sampling and of the torch runner
        try:
            places = [i for i in range(len(step.requests)) if step.samples(i)]
            rows = [step.requests[i] for i in places]
            if self._grammars.used:
                self._grammars.look_ahead(rows)
            logits, failed = self._logits(step, places)
            # A search draws nothing, and its sequences are no answers yet.
            seeds = [answers[r.id].seed if r.beams is None else 0 for r in rows]
            known = self.best_of(len(logits))  # the native head looks for each row's largest logit as it writes them
            chosen = self._beams.choose(searching, step, places, logits, known, n_threads) if searching else []
            taken = verify(logits, step, places, seeds, known, n_threads)
        except BaseException:  # Ctrl-C too: a request whose step was lost computes the same tokens again
            self.scheduler.abandon(step)
            raise
        finally:
            if n_threads != self.n_threads:
                torch.set_num_threads(self.n_threads)
        if searching:
            places, rows, taken = _without_beams(places, rows, taken)

        tokens: list[int | list[int] | None] = [None] * len(step.requests)
        for place, request, new in zip(places, rows, taken.tokens, strict=True):
            if not new:
                failed.add(request.id)
            else:
                tokens[place] = new if place in step.drafts else new[0]
        vectors = self._pooled.completed(step)
        for place, vector in vectors.items():
            if vector is None:
                failed.add(step.requests[place].id)
            tokens[place] = 0  # it is nobody's: a token ends the request
        failed.update(self.adapters.unheld(step.requests))
        lost = _lost(step, chosen, failed) if searching else set()
        finished = self.scheduler.update(step, tokens, failed)

        for name, scores in self._prompt_scores.take():
            # An interrupted step keeps its scores for the next one; until then their request may be aborted.
            if name in answers and name not in failed:
                events.append(self._answers.event(name, [], scores=scores))
        n_output = 0
        if searching:
            n_output = self._go_on(chosen, lost, failed, events)
        for request, new, entries in zip(rows, taken.tokens, taken.logprobs, strict=True):
            if request.id not in failed:
                n_output += len(new)
                scored = None if request.params.logprobs is None else [entry for entry in entries if entry is not None]
                events.append(self._answers.event(request.id, new, scored, request.finish_reason, weights=request.weights))
                if request.n_output == len(new) and request.fork_of is None:
                    events[-1].cached_tokens, events[-1].started_s = request.n_prefix_hit, request.started_s
        for place, vector in vectors.items():
            request = step.requests[place]
            if request.id not in failed:
                event = self._answers.event(request.id, [], finish_reason=request.finish_reason, weights=request.weights)
                event.cached_tokens, event.embedding, event.started_s = request.n_prefix_hit, vector, request.started_s
                events.append(event)
        for request in finished:
            if request.id in failed:
                events.append(self._answers.event(request.id, [], finish_reason="error"))
            self._remember(request)
            self._forget(request.id)

        n_wrong = _wrong_drafts(step, places, taken) if step.drafts else 0
        seconds = time.perf_counter() - began
        self._counter.count(step, n_output, len(logits), n_wrong, len(failed), seconds, self._runner.experts, self.exits)
        for watching in (self._drafting.drafter, self._below.disk, self.scheduler.pace):
            if watching is not None:
                watching.saw(step, seconds)
        if not answers:  # nothing runs any more, so nothing is scored either
            self.release_logits()
        if isinstance(self._runner, Generations):
            self._let_go([])
        return events

    def _timed_out(self, request: Request) -> list[TokenEvent]:
        """The events of a request that the scheduler has ended."""
        if request.beams is not None:
            return self._found(request, "timeout")
        event = self._answers.event(request.id, [], finish_reason="timeout")
        self._remember(request)
        self._forget(request.id)
        return [event]

    def _go_on(self, chosen: Sequence[Chosen], lost: set[Request], failed: set[str], events: list[TokenEvent]) -> int:
        """Let searches go on with what was chosen, and end those that are done or ``lost``: their answers go to ``events``. Of
        a lost search ``failed`` names the request alone from here on. Returns how many tokens were answered."""
        n_output = 0
        for root, search in chosen:
            if search is not None and root not in lost:
                self.scheduler.go_on(root, search)
                if search.done:
                    events += self._found(root)
                    n_output += sum(beam.length for _, beam in search.answers()[: root.params.n])
        for root in lost:
            failed.difference_update(request.id for request in _sequences(root))
            failed.add(root.id)
            self.scheduler.fail(root)
            events += self._found(root, "error")
        return n_output

    def _found(self, root: Request, why: FinishReason | None = None) -> list[TokenEvent]:
        """The answers of a search that has ended, by itself or because of ``why``; it is forgotten."""
        events = self._answers.of_search(root, why)
        self._forget(root.id)
        return events

    def _logits(self, step: ScheduledStep, places: Sequence[int]) -> tuple[Tensor, set[str]]:
        """Logits of the last rows of the requests at ``places``, and the ids of requests whose prompts cannot be scored because
        the model's output is not finite. Prompts that are to be scored are scored on the way."""
        if step.copies:  # answers share their prompt's full pages; the page within which they part is copied for each
            self.pool.copy(step.copies)
        wanted = self._prompt_scores.wanted(step)
        if not wanted and self._pooled.idle:
            return self.compute(step), set()
        pooled = self._pooled.wanted(step)
        logits = self.compute(step, rows_of(step, [*wanted, *pooled]), sum(n for _, _, n in pooled))
        self._pooled.add(step, pooled, self._runner.hidden)
        n = len(places) + sum(map(len, step.drafts.values()))
        known = self.best_of(len(logits))
        largest = logits[n:].amax(dim=1) if known is None else known[0][n:]
        return logits[:n], self._prompt_scores.add(step, wanted, logits[n:], largest, self.threads_for(step))

    def compute(self, step: ScheduledStep, rows: Tensor | None = None, n_hidden: int = 0) -> Tensor:
        """Run ``step``. Returns fp32 logits of the rows that a token is sampled from, or of ``rows`` (indices of its rows), of
        which the last ``n_hidden`` have hidden states instead."""
        runner = self.exits or self._runner
        return runner.run(step, rows, self.threads_for(step), n_hidden=n_hidden)

    def best_of(self, n: int) -> tuple[Tensor, Tensor] | None:
        """The largest logit of each of the last step's first ``n`` rows and its token, where the runner looks for them."""
        return (self.exits or self._runner).best_of(n)

    def release_logits(self) -> None:
        """Free the logits beyond one row for each running request, which only scoring needs."""
        self._runner.release_logits()

    @property
    def logits_bytes(self) -> int:
        """Most bytes that a step's logits take: a row for each running request, each drafted token and each prompt token it
        scores."""
        config = self.scheduler.config
        return logits_bytes(self.spec.vocab_size, config.max_running + config.draft_rows + config.max_scored_rows)

    def stats(self) -> EngineStats:
        """A copy of the counters."""
        scheduler, admission, counts = self.scheduler, self.scheduler.admission, self._counter.stats
        counts.running, counts.waiting = scheduler.n_running, scheduler.n_waiting
        counts.pages_used, counts.pages_cached = scheduler.pool.n_used, scheduler.pool.n_cached
        counts.preemptions = scheduler.n_preemptions
        counts.draft_tokens, counts.accepted_draft_tokens = scheduler.n_drafted, scheduler.n_drafts_right
        counts.prompt_tokens, counts.prefix_hit_tokens = admission.n_prompt_tokens, admission.n_prefix_hit_tokens
        if self._below.disk is not None:
            disk = self._below.disk.counts()
            counts.disk_pages, counts.disk_hit_tokens, counts.disk_load_s = disk.pages, disk.hit_tokens, disk.load_s
            counts.disk_pages_written, counts.disk_requests_dropped = disk.written, disk.dropped
            counts.disk_pages_damaged, counts.disk_loads_refused = disk.damaged, disk.refused
        if self.exits is not None:
            counts.exits = self.exits.histogram()
            counts.exit_rows = sum(counts.exits.values())
            counts.exit_row_layers = sum(layers * n for layers, n in counts.exits.items())
        self.adapters.report(counts)
        if self._runner.experts is not None:
            counts.expert_load = self._runner.experts.ratio()
        return EngineStats(**vars(counts))

    def threads_for(self, step: ScheduledStep) -> int:
        """One for a small step, and no more than there are processors that no other program takes for itself, unless the
        settings name a number. ``Crossovers`` has the measurements of small steps; threads that share a processor with another
        program hold up all others at every barrier."""
        flop = step.n_tokens * self._meter.row_flop
        n_served = step.n_decodes if self.settings.in_server else 0
        small = self.plan.crossovers.takes_one_thread(self._meter.weights_bytes, flop, n_served)
        return 1 if small and self.settings.n_threads is None else self._left


def _lost(step: ScheduledStep, chosen: Sequence[Chosen], failed: set[str]) -> set[Request]:
    """The searches of which a sequence failed. ``failed`` gets the sequences of those that cannot go on."""
    failed.update(request.id for root, search in chosen if search is None for request in _sequences(root))
    return {r.beams.root for r in step.requests if r.beams is not None and r.id in failed}


def _wrong_drafts(step: ScheduledStep, places: Sequence[int], taken: Taken) -> int:
    of_places = zip(places, taken.tokens, strict=True)
    return sum(len(step.drafts[place]) + 1 - len(new) for place, new in of_places if place in step.drafts)


def _sequences(root: Request) -> Sequence[Request]:
    return () if root.beams is None else root.beams.live


def _without_beams(places: Sequence[int], rows: Sequence[Request], taken: Taken) -> tuple[list[int], list[Request], Taken]:
    """The same without the sequences of searches, whose tokens are chosen otherwise."""
    kept = [k for k, request in enumerate(rows) if request.beams is None]
    new = Taken([taken.tokens[k] for k in kept], [taken.logprobs[k] for k in kept])
    return [places[k] for k in kept], [rows[k] for k in kept], new
