"""`dflash-run generate`: load a core, continue one prompt, and say how fast and how well the draft did."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import runtime
from runtime.capacity import Capacity, capacity_of
from runtime.engine import Completion, Engine, Request, StepKind, StepRecord
from runtime.gpu.core import GpuCore
from runtime.text import CoreText
from runtime.trust import TrustPolicy


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished generation and its clock readings, in seconds; `phases` are those of a load onto a GPU."""

    prompt_tokens: int
    text: str
    completion: Completion
    core_digest: str
    load_s: float
    prefill_s: float
    decode_s: float
    phases: Mapping[str, float]
    capacity: Capacity

    @property
    def decode_steps(self) -> int:
        return sum(s.kind is not StepKind.PREFILL for s in self.completion.steps)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, over the time they took."""
        return (len(self.completion.tokens) - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        accepted = [s.accepted for s in self.completion.steps if s.kind is StepKind.VERIFY]
        return {
            "core_digest": self.core_digest, "text": self.text, "tokens": list(self.completion.tokens),
            "finish_reason": self.completion.finish_reason.value, "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.completion.tokens), "decode_steps": self.decode_steps,
            "tokens_per_step": self.completion.tokens_per_step, "tokens_per_s": self.tokens_per_s,
            "accepted_per_step": accepted, "load_s": self.load_s, "prefill_s": self.prefill_s,
            "decode_s": self.decode_s, "load_phases": dict(self.phases),
            "kv_tokens": self.capacity.kv_tokens, "snapshot_slots": self.capacity.snapshot_slots,
        }

    def phase_summary(self) -> str:
        """Where the load's time went; empty for a CPU."""
        return "   ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in self.phases.items())

    def summary(self) -> str:
        steps = self.decode_steps
        per_step = f"{self.decode_s / steps * 1e3:.1f} ms/step" if steps else "no decode step"
        return (f"{self.prompt_tokens} + {len(self.completion.tokens)} tokens   "
                f"{self.completion.tokens_per_step:.2f} tokens/step   {self.tokens_per_s:.1f} tokens/s   {per_step}   "
                f"load {self.load_s:.2f} s   first token {self.prefill_s:.2f} s")


def generate(path: Path, trust: TrustPolicy, prompt: str, request: Request, *, chat: bool, device: str = "cpu",
             on_text: Callable[[str], None]) -> Generated:
    """Load a core and continue one prompt with it.

    Args:
        request: sampling and limits; the model's own stop tokens are added.
        chat: wrap the prompt in the model's chat template as a user message.
        device: "cpu", "cuda" or "cuda:N".
        on_text: told each piece of text as soon as it is known.
    """
    started = time.perf_counter()
    with runtime.load(path, trust=trust, device=device) as core:
        text = CoreText(core)
        engine = Engine(core, record_candidates=False)
        loaded = time.perf_counter()
        ids = text.encode_chat([{"role": "user", "content": prompt}]) if chat else text.encode(prompt)
        stream = text.stream()
        first: list[float] = []

        def on_step(record: StepRecord) -> None:
            first.append(time.perf_counter())
            for token in record.tokens:
                piece = stream.push(token)
                if piece:
                    on_text(piece)

        stop = (*request.stop_token_ids, *text.stop_token_ids)
        completion = engine.generate(ids, replace(request, stop_token_ids=stop), on_step)
        ended = time.perf_counter()
        return Generated(len(ids), text.decode(completion.tokens), completion, core.core_digest, loaded - started,
                         first[0] - loaded, ended - first[0], core.phases if isinstance(core, GpuCore) else {},
                         capacity_of(core.manifest, core.symbols))
