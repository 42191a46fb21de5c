"""Prometheus metrics under the names that vLLM's dashboards query, and a few of our own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from runtime.canary import BOUND_RATIO, Canary, mean_accepted
from runtime.engine import Engine, StepKind, StepRecord
from runtime.serve.worker import Job

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                  40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                   80.0)
REQUEST_BUCKETS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                     480.0, 960.0, 1920.0, 7680.0)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_PARTS = ("prefill", "draft", "verify", "decode", "host")
MIN_CANARY_STEPS = 200
"""Verify steps before live acceptance is compared with the canary's bound."""


def token_count_buckets(max_context: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to the context."""
    buckets: list[int] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > max_context:
                return tuple(buckets)
            buckets.append(step * power)
        power *= 10


class Metrics:
    """One server's metrics; it observes the engine worker, and `exposition` is what /metrics answers."""

    def __init__(self, model: str, max_context: int, depth: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._depth = depth
        self._canary_bound: float | None = None
        self._steps = self._accepted_total = 0
        tokens = token_count_buckets(max_context)
        self.running = self._gauge("vllm:num_requests_running", "Requests that hold a slot.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot or for pages.")
        self.kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of K/V pages in use; 1 is all of them.")
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in a prefix cache.")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found there; there is no such cache.")
        self.preemptions = self._counter("vllm:num_preemptions", "Requests that lost their slot; none does.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens prefilled.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.success = Counter("vllm:request_success", "Requests by how they ended.",
                               (*self._labels, "finished_reason"), registry=self.registry)
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to first token.", TTFT_BUCKETS_S)
        self.itl = self._histogram("vllm:inter_token_latency_seconds", "Between steps that gave a request tokens.",
                                   TOKEN_BUCKETS_S)
        self.tpot = self._histogram("vllm:request_time_per_output_token_seconds", "Mean per token after the first.",
                                    TOKEN_BUCKETS_S)
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to end.", REQUEST_BUCKETS_S)
        self.queue_time = self._histogram("vllm:request_queue_time_seconds", "Waiting for a slot.", REQUEST_BUCKETS_S)
        self.prefill_time = self._histogram("vllm:request_prefill_time_seconds", "From slot to first token.",
                                            REQUEST_BUCKETS_S)
        self.decode_time = self._histogram("vllm:request_decode_time_seconds", "From first token to last.",
                                           REQUEST_BUCKETS_S)
        self.inference_time = self._histogram("vllm:request_inference_time_seconds", "From slot to last token.",
                                              REQUEST_BUCKETS_S)
        self.request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.request_generation = self._histogram("vllm:request_generation_tokens", "Tokens a request was given.",
                                                  tokens)
        self.iteration_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of an engine step.",
                                                ITERATION_BUCKETS)
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Verify steps.")
        self.draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Proposals that took part.")
        self.accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Proposals that were kept.")
        per_position = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Proposals kept, by position from 0.",
                               (*self._labels, "position"), registry=self.registry)
        self.accepted_at = [per_position.labels(**self._labels, position=str(i)) for i in range(depth)]
        step_seconds = Histogram("dflash:step_seconds", "Where an engine step spends its time.", ("part",),
                                 buckets=TTFT_BUCKETS_S, registry=self.registry)
        self.step_seconds = {part: step_seconds.labels(part=part) for part in STEP_PARTS}
        self.startup_seconds = Gauge("dflash:startup_seconds", "Time of each start-up phase.", ("phase",),
                                     registry=self.registry)
        self.below_canary = Gauge("dflash:acceptance_below_canary", "1 while live acceptance is under the canary's "
                                  "bound; 0 also until enough steps are known.", registry=self.registry)
        self._iteration = 0

    def core_info(self, **labels: str) -> None:
        """Say once which core is served."""
        Gauge("dflash:core_info", "The core that is served.", tuple(labels),
              registry=self.registry).labels(**labels).set(1)

    def compare_with(self, canaries: Sequence[Canary]) -> None:
        """Hold live acceptance against the bound of the first canary that has a draft."""
        for canary in canaries:
            if canary.depth:
                self._canary_bound = BOUND_RATIO * mean_accepted(canary.prompts)
                return

    def exposition(self) -> bytes:
        """The text format, version 0.0.4."""
        return generate_latest(self.registry)

    def submitted(self, job: Job) -> None:
        self.request_prompt.observe(len(job.prompt))

    def stepped(self, job: Job, record: StepRecord, now: float) -> None:
        count = len(record.tokens)
        self.generation_tokens.inc(count)
        self._iteration += count
        if record.kind is StepKind.PREFILL:
            self.prompt_tokens.inc(len(job.prompt))
            self.prefix_queries.inc(len(job.prompt))
            self.ttft.observe(now - job.arrived)
            self.queue_time.observe(max(job.admitted - job.arrived, 0.0))
            self.prefill_time.observe(max(now - job.admitted, 0.0))
            return
        self.itl.observe(now - job.last_token)
        if record.kind is StepKind.VERIFY:
            accepted = min(record.accepted, record.proposed)
            self.drafts.inc()
            self.draft_tokens.inc(record.proposed)
            self.accepted.inc(accepted)
            for position in range(accepted):
                self.accepted_at[position].inc()
            self._steps += 1
            self._accepted_total += accepted

    def ended(self, job: Job, reason: str, now: float) -> None:
        self.success.labels(**self._labels, finished_reason=reason).inc()
        self.e2e.observe(now - job.arrived)
        if reason not in ("stop", "length") or job.sequence is None:
            return
        generated = len(job.sequence.tokens)
        self.request_generation.observe(generated)
        self.decode_time.observe(max(job.last_token - job.first_token, 0.0))
        self.inference_time.observe(max(job.last_token - job.admitted, 0.0))
        if generated > 1:
            self.tpot.observe((job.last_token - job.first_token) / (generated - 1))

    def engine_stepped(self, engine: Engine) -> None:
        times = engine.times
        for part, seconds in (("prefill", times.prefill_s), ("draft", times.draft_s), ("verify", times.verify_s),
                              ("decode", times.decode_s)):
            if seconds:
                self.step_seconds[part].observe(seconds)
        self.step_seconds["host"].observe(max(times.host_s, 0.0))
        self.iteration_tokens.observe(self._iteration)
        self._iteration = 0
        self.read_engine(engine)
        if self._canary_bound is not None and self._steps >= MIN_CANARY_STEPS:
            self.below_canary.set(self._accepted_total / self._steps < self._canary_bound)

    def read_engine(self, engine: Engine) -> None:
        """Bring the gauges up to date."""
        self.running.set(engine.running)
        self.waiting.set(engine.waiting)
        total = engine.core.symbols["kv_pages"]
        self.kv_usage.set((total - engine.pages.available) / total)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, tuple(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, tuple(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, tuple(self._labels), buckets=tuple(buckets),
                         registry=self.registry).labels(**self._labels)
