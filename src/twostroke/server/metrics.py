"""Keeps what ``/metrics`` shows, in Prometheus' text format. Latencies are measured in this process, from the moment a
request's headers are read to the moment its tokens are ready to be written."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from twostroke.core.policy import MAX_ADAPTERS
from twostroke.server.engines import Engines
from twostroke.server.keys import Account, Used
from twostroke.server.response_cache import ResponseCache
from twostroke.server.served import peak_memory_bytes
from twostroke.server.token_stream import TokenStream
from twostroke.server.wait import Asked, Waiting

if TYPE_CHECKING:
    from twostroke.server.pool import ModelPool

disable_created_metrics()  # a second series beside each counter, which nothing here reads

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)

ENGINE_GAUGES: dict[str, tuple[str, str]] = {
    "running": ("twostroke_requests_running", "Requests that hold KV pages."),
    "waiting": ("twostroke_requests_waiting", "Requests queued in the engine."),
    "pages_used": ("twostroke_kv_pages_used", "KV pages held by running requests."),
    "pages_cached": ("twostroke_kv_pages_cached", "KV pages free for use that still hold a reusable prefix."),
    "pages_total": ("twostroke_kv_pages", "KV pages there are."),
    "adapters": ("twostroke_adapters", "Adapters that requests may name."),
    "adapters_held": ("twostroke_adapters_held", "Adapters in memory."),
    "adapter_bytes": ("twostroke_adapter_bytes", "Memory of adapters."),
    "adapter_loads": ("twostroke_adapter_loads", "Adapters read from disk since the engine started."),
    "adapter_load_s": ("twostroke_adapter_load_seconds", "Time of these reads."),
    "adapter_hits": ("twostroke_adapter_hits", "Admitted requests whose adapter was in memory."),
    "adapter_evictions": ("twostroke_adapter_evictions", "Adapters that left memory to make room for others."),
    "output_tokens": ("twostroke_engine_output_tokens", "Tokens generated since the engine started, step by step."),
    "prefix_hit_tokens": ("twostroke_prefix_hit_tokens", "Prompt tokens found in the KV cache since the engine started."),
    "disk_hit_tokens": ("twostroke_disk_hit_tokens", "Tokens loaded from the disk tier, most of them prefix hits."),
    "disk_load_s": ("twostroke_disk_load_seconds", "Time of loading them."),
    "disk_loads_refused": ("twostroke_disk_loads_refused", "Admissions for which computing was predicted to be faster."),
    "disk_pages": ("twostroke_disk_pages", "KV pages in the disk tier."),
    "disk_pages_written": ("twostroke_disk_pages_written", "KV pages written to the disk tier since the engine started."),
    "disk_pages_damaged": ("twostroke_disk_pages_damaged", "KV pages of the disk tier that were found damaged."),
    "disk_requests_dropped": ("twostroke_disk_requests_dropped", "Requests whose pages were not written: too many waited."),
    **{
        f"{kind}_{field}": (f"twostroke_engine_{kind}_{name}", f"{meaning} {kind} steps since the engine started.")
        for kind in ("prefill", "mixed", "decode")
        for field, name, meaning in (
            ("steps", "steps", "Number of"),
            ("s", "seconds", "Time of"),
            ("tokens", "tokens", "Tokens computed in"),
        )
    },
    "handover_requests": ("twostroke_handover_requests", "Requests of whose prompt other engines computed pages."),
    "handover_tokens": ("twostroke_handover_tokens", "Prompt tokens whose keys and values came from other engines."),
    "handover_bytes": ("twostroke_handover_bytes", "Bytes of them."),
    "handover_s": ("twostroke_handover_seconds", "Time of copying, sending and checking them, without computing them."),
    "handover_wait_s": ("twostroke_handover_wait_seconds", "Time that these requests waited, computing included."),
    "handover_incomplete": ("twostroke_handover_incomplete", "Requests of which pages did not come, and were computed here."),
    "handover_damaged": ("twostroke_handover_damaged", "Pages that were not what was said of them, and were computed here."),
    "handover_peers": ("twostroke_handover_peers", "Engines that compute prompts for this one now."),
    "lent_prompts": ("twostroke_lent_prompts", "Prompts that other engines asked for."),
    "lent_pages": ("twostroke_lent_pages", "Pages that were handed over to other engines."),
    "lent_bytes": ("twostroke_lent_bytes", "Bytes of them."),
    "lent_pinned": ("twostroke_lent_pages_pinned", "Pages that wait to be sent to other engines."),
    "lent_peers": ("twostroke_lent_peers", "Engines that this one computes prompts for."),
    "decode_bytes": ("twostroke_engine_decode_bytes", "Bytes of weights and KV cache that decode steps had to read."),
    "peak_memory_bytes": ("twostroke_engine_peak_memory_bytes", "Most memory that the engine process has held."),
    "expert_load": (
        "twostroke_engine_expert_load",
        "Largest load of an expert over its layer's mean load since the engine started; 0 without experts.",
    ),
    "weight_changes": ("twostroke_weight_changes", "Times that weights were replaced since the engine started."),
    "weight_pause_s": ("twostroke_weight_pause_seconds", "Time in which the engine computed nothing, at the last one."),
    "draft_tokens": ("twostroke_engine_draft_tokens", "Drafted tokens that steps checked since the engine started."),
    "accepted_draft_tokens": (
        "twostroke_engine_accepted_draft_tokens",
        "Drafted tokens that were right since the engine started.",
    ),
    "exit_rows": ("twostroke_engine_exit_rows", "Rows that might leave before the last layer since the engine started."),
    "exit_row_layers": ("twostroke_engine_exit_row_layers", "Layers that these rows passed since the engine started."),
    "decode_requests": (
        "twostroke_engine_decode_requests",
        "Requests that decoded, summed over decode steps, since the engine started.",
    ),
    "preemptions": ("twostroke_preemptions", "Requests put back into the queue for lack of pages since the engine started."),
}
"""Fields of ``EngineStats`` that are shown, with metric name and meaning."""

REPLICA_GAUGES: dict[str, tuple[str, str]] = {
    "up": ("twostroke_replica_up", "1 while the engine answers and takes requests."),
    "running": ("twostroke_replica_requests_running", "Requests that hold KV pages."),
    "waiting": ("twostroke_replica_requests_waiting", "Requests queued in the engine."),
    "kv_usage": ("twostroke_replica_kv_usage", "Share of the KV pages that running requests hold, 0 to 1."),
    "in_flight": ("twostroke_replica_answers_in_flight", "Unfinished answers that were sent there."),
    "restarts": ("twostroke_replica_restarts", "Times the engine was started anew."),
    "routed": ("twostroke_replica_requests_routed", "Requests that were sent there."),
    "taken_over": ("twostroke_replica_requests_taken_over", "Requests that another engine had begun and lost."),
    "known_tokens": ("twostroke_replica_prompt_tokens_known", "Prompt tokens that it was known to have cached when chosen."),
    "predicted_ttft_s": ("twostroke_replica_predicted_ttft_seconds", "Sum of the predicted times to first tokens."),
    "measured_ttft_s": ("twostroke_replica_measured_ttft_seconds", "Sum of the measured times of the same requests."),
}
"""What is shown of each engine, labelled ``replica``."""

ROUTER_GAUGES = {
    "vllm:num_requests_running": "Requests that hold KV pages.",
    "vllm:num_requests_waiting": "Requests queued in the engines.",
    "vllm:kv_cache_usage_perc": "Share of the KV pages that running requests hold, 0 to 1.",
}
"""What routers before several servers read (llm-d, KServe, the Gateway API's inference extension), under the names that they
look for if nobody tells them others."""

MODEL_GAUGES: dict[str, tuple[str, str]] = {
    "loaded": ("twostroke_model_loaded", "1 while the model is loaded."),
    "asleep": ("twostroke_model_asleep", "1 while its process is there without weights and cache."),
    "bytes": ("twostroke_model_bytes", "Memory that counts for the model now: predicted, corrected by what its process holds."),
    "predicted_bytes": ("twostroke_model_predicted_bytes", "Memory that was predicted of it before it was loaded."),
    "under_way": ("twostroke_model_requests_under_way", "Requests that keep it loaded."),
    "waiting": ("twostroke_model_requests_waiting", "Requests that wait until it is loaded."),
    "loads": ("twostroke_model_loads", "Times that it was loaded since the start."),
    "wakes": ("twostroke_model_wakes", "Times that it was woken instead."),
    "evictions": ("twostroke_model_evictions", "Times that it made room for another model."),
    "load_s": ("twostroke_model_load_seconds", "What its last load took."),
    "wake_s": ("twostroke_model_wake_seconds", "What it took to wake it the last time."),
    "requests": ("twostroke_model_requests", "Requests that it answered since the start."),
    "prompt_tokens": ("twostroke_model_prompt_tokens", "Tokens of their prompts."),
    "output_tokens": ("twostroke_model_output_tokens", "Tokens that it wrote."),
}
"""What is shown of each of several models, labelled ``model``."""

RESPONSE_CACHE_GAUGES = {
    "hits": "Requests answered from the response cache since the start.",
    "misses": "Requests whose answer could have been there and was not.",
    "stored": "Answers that were kept.",
    "evicted": "Answers that made room for others.",
    "damaged": "Files that were not the answer that they should hold.",
    "answers": "Answers in the response cache.",
    "bytes": "Bytes of their files.",
}
"""What is shown of the response cache; all 0 without one."""


CAPTURE_COUNTS: dict[str, tuple[str, str]] = {
    "written": ("twostroke_captured_chats", "Chats that were captured since the start."),
    "withheld": ("twostroke_captured_chats_withheld", "Chats of which the redaction left nothing."),
    "dropped": ("twostroke_captured_chats_dropped", "Chats and ratings that could not be written, or came too fast."),
    "rated": ("twostroke_captured_ratings", "Ratings that were captured since the start."),
}
"""Fields of ``capture.Counts``, with metric name and meaning."""


_OF_KEYS = {
    "requests": "Requests of a key that the engine worked on, since the server started.",
    "refused": "Requests of a key that its limits refused.",
    "prompt_tokens": "Prompt tokens of a key.",
    "cached_tokens": "Those of them that were cached.",
    "output_tokens": "Tokens generated for a key.",
}


class Metrics:
    """The metrics of one server, in a registry of its own: two servers in a process (as in tests) share no counts."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        r = self._registry = CollectorRegistry(auto_describe=True)
        self.responses = Counter("twostroke_http_responses", "Responses by route and status.", ["route", "status"], registry=r)
        self.finished = Counter("twostroke_requests_finished", "Completions by how they ended.", ["reason"], registry=r)
        self.prompt_tokens = Counter("twostroke_prompt_tokens", "Prompt tokens of accepted requests.", registry=r)
        self.output_tokens = Counter("twostroke_output_tokens", "Tokens generated.", registry=r)
        self.ttft = Histogram("twostroke_ttft_seconds", "Request read to first token.", buckets=_SECONDS, registry=r)
        self.tpot = Histogram(
            "twostroke_tpot_seconds", "(E2E - TTFT) / (output tokens - 1).", buckets=_TOKEN_SECONDS, registry=r
        )
        self.e2e = Histogram("twostroke_e2e_seconds", "Request read to last token.", buckets=_SECONDS, registry=r)
        self._predicted = Gauge(
            "twostroke_predicted_seconds",
            "Latencies predicted before the start, for one request at a time of so many tokens.",
            ["latency", "prompt_tokens", "output_tokens"],
            registry=r,
        )
        self.refused = Counter(
            "twostroke_requests_refused", "Requests that were told to come back later, by why.", ["why"], registry=r
        )
        self.wait = Gauge(
            "twostroke_predicted_wait_seconds", "Predicted wait of a prompt of one token that came now.", registry=r
        )
        self.wait_ratio = Gauge(
            "twostroke_wait_ratio", "Running ratio of measured waits for a first token to planned ones.", registry=r
        )
        self.waiting_tokens = Gauge("twostroke_waiting_tokens", "Tokens of prompts that wait for a first token.", registry=r)
        self.usage_lost = Gauge("twostroke_usage_lines_lost", "Lines that the usage log could not take.", registry=r)
        self._of_keys = {
            each.name: Gauge(f"twostroke_key_{each.name}", _OF_KEYS[each.name], ["key"], registry=r) for each in fields(Used)
        }
        self.active = Gauge("twostroke_http_requests_active", "Answers admitted and not yet finished.", registry=r)
        self.ready = Gauge("twostroke_ready", "1 while the engine answers.", registry=r)
        self.peak_memory = Gauge("twostroke_http_peak_memory_bytes", "Most memory that the HTTP process has held.", registry=r)
        self.restarts = Gauge("twostroke_engine_restarts", "Times the engine was started anew.", registry=r)
        self._lora = Gauge(
            "twostroke_lora_info",
            "Adapters of requests under way; the value is the time of the last look.",
            ["running_lora_adapters", "waiting_lora_adapters", "max_lora"],
            registry=r,
        )
        self._routers = {name: Gauge(name, text, ["model_name"], registry=r) for name, text in ROUTER_GAUGES.items()}
        self._router_lora = Gauge(
            "vllm:lora_requests_info",
            "Adapters of requests under way; the value is the time of the last look.",
            ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            registry=r,
        )
        self._router_cache = Gauge(
            "vllm:cache_config_info", "Pages of the KV cache and their tokens.", ["block_size", "num_gpu_blocks"], registry=r
        )
        rows = REPLICA_GAUGES.items()
        self._replica = {field: Gauge(name, text, ["replica"], registry=r) for field, (name, text) in rows}
        self._models = {field: Gauge(name, text, ["model"], registry=r) for field, (name, text) in MODEL_GAUGES.items()}
        self._models_budget = Gauge("twostroke_models_budget_bytes", "Memory that loaded models may take together.", registry=r)
        self._ratings = Gauge("twostroke_ab_ratings", "Ratings in the A/B test since the start.", ["arm", "rating"], registry=r)
        self._kept = {
            name: Gauge(f"twostroke_response_cache_{name}", text, registry=r) for name, text in RESPONSE_CACHE_GAUGES.items()
        }
        self._engine = {field: Gauge(name, text, registry=r) for field, (name, text) in ENGINE_GAUGES.items()}

    def predict(self, latencies: Mapping[str, float], prompt_tokens: int, output_tokens: int) -> None:
        """Show predicted ``latencies``, in seconds by their names (``ttft``), of requests of so many tokens."""
        for name, seconds in latencies.items():
            self._predicted.labels(name, str(prompt_tokens), str(output_tokens)).set(seconds)

    def follow_capture(self, counts: object) -> None:
        """Show ``capture.Counts`` as they are when they are asked for."""
        for field, (name, text) in CAPTURE_COUNTS.items():
            Gauge(name, text, registry=self._registry).set_function(partial(getattr, counts, field))

    def show_engines(self, engines: Engines) -> None:
        """Show each engine by its number, and the adapters of the requests that they have."""
        for i, row in enumerate(engines.rows()):
            for field, value in row.items():
                self._replica[field].labels(str(i)).set(value)
        self._show_adapters(engines.streams)

    def show_models(self, pool: ModelPool) -> None:
        """Show each model by its name, the budget, the ratings of a test, and the adapters of requests under way."""
        self._models_budget.set(pool.budget_bytes)
        for name, row in pool.rows():
            for field, value in row.items():
                self._models[field].labels(name).set(value)
        for labels, n in pool.split.ratings.items() if pool.split is not None else ():
            self._ratings.labels(*labels).set(n)
        self._show_adapters([stream for member in pool.members for stream in member.client.streams])

    def _show_adapters(self, streams: Sequence[TokenStream]) -> None:
        running = {stream.lora for stream in streams if stream.lora is not None and stream.first_s is not None}
        waiting = {stream.lora for stream in streams if stream.lora is not None} - running
        self._lora.clear()
        self._lora.labels(",".join(sorted(running)), ",".join(sorted(waiting)), str(MAX_ADAPTERS)).set(time.time())
        self._router_lora.clear()
        self._router_lora.labels(str(MAX_ADAPTERS), ",".join(sorted(running)), ",".join(sorted(waiting))).set(time.time())

    def show_to_routers(self, model: str, page_tokens: int, stats: Mapping[str, float]) -> None:
        """Show the engines' counters under vLLM's names."""
        pages = stats.get("pages_total", 0.0)
        usage = stats.get("pages_used", 0.0) / pages if pages else 0.0
        values = (stats.get("running", 0.0), stats.get("waiting", 0.0), usage)
        for gauge, value in zip(self._routers.values(), values, strict=True):
            gauge.labels(model).set(value)
        self._router_cache.clear()
        self._router_cache.labels(str(page_tokens), str(round(pages))).set(1)

    def show_kept(self, cache: ResponseCache) -> None:
        values = asdict(cache.counts) | {"answers": len(cache), "bytes": cache.n_bytes}
        for name, gauge in self._kept.items():
            gauge.set(values[name])

    def observe(self, started_s: float, first_s: float | None, ended_s: float, n_output: int) -> None:
        """Count one finished answer. Times are of one monotonic clock."""
        self.output_tokens.inc(n_output)
        if first_s is None:
            return
        self.ttft.observe(first_s - started_s)
        self.e2e.observe(ended_s - started_s)
        if n_output > 1:
            self.tpot.observe((ended_s - first_s) / (n_output - 1))

    def show_waiting(self, waiting: Waiting) -> None:
        """Show the queue and what is predicted of it."""
        self.waiting_tokens.set(waiting.tokens)
        if waiting.predicts:
            self.wait.set(waiting.first_token_s([Asked()]))
            self.wait_ratio.set(waiting.ratio.mean)

    def show_keys(self, accounts: Iterable[Account]) -> None:
        """Show what each key has used, under its name."""
        for account in accounts:
            for name, gauge in self._of_keys.items():
                gauge.labels(account.name).set(getattr(account.used, name))

    def render(self, engine: dict[str, float]) -> bytes:
        for field, gauge in self._engine.items():
            if field in engine:
                gauge.set(engine[field])
        self.peak_memory.set(peak_memory_bytes())
        return generate_latest(self._registry)
