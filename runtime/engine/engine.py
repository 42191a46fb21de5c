"""The loop that drives a core: admit sequences, prefill in chunks, then draft and verify (or decode) until done.

    engine = Engine(core)
    completion = engine.generate(prompt_ids, Request(max_tokens=64, stop_token_ids=(2,)))

All that changes between steps lives in the core's buffers. The host writes a sequence's page table, limit and sampling
settings once, names the lanes of each launch in `slots`, and reads the produced tokens after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from dflash_core.errors import CompatibilityError, UsageError

from runtime.engine.pages import PagePool
from runtime.engine.sequence import Completion, Request, Sequence, StepKind, StepRecord
from runtime.run import LoadedCore


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step did for one sequence."""

    sequence: Sequence
    record: StepRecord


class Engine:
    """Runs sequences on a loaded core. Sequences join and leave between steps; what else is in the batch never
    changes a sequence's tokens."""

    def __init__(self, core: LoadedCore) -> None:
        self.core = core
        contract = core.manifest.contract
        self.page_tokens: int = contract.page_tokens
        self.max_context: int = contract.max_context
        self.max_batch: int = contract.max_batch
        self.pages = PagePool(core.symbols["kv_pages"])
        self._free_slots = list(range(self.max_batch - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._can_speculate = "proposals" in core.io

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def generate(self, prompt: SequenceOf[int], request: Request,
                 on_step: Callable[[StepRecord], None] | None = None) -> Completion:
        """Run one prompt to its end, with nothing else in the batch.

        Args:
            prompt: token ids, at least one.
            on_step: told each step's record as it is committed.
        """
        sequence = self.add(prompt, request)
        try:
            while sequence.finish_reason is None:
                for output in self.step():
                    if on_step is not None and output.sequence is sequence:
                        on_step(output.record)
        finally:
            self.abort(sequence)
        return sequence.completion()

    def add(self, prompt: SequenceOf[int], request: Request) -> Sequence:
        """Queue a prompt.

        Raises:
            UsageError: PROMPT_EMPTY.
            CompatibilityError: CONTEXT_LENGTH; prompt and new tokens do not fit the core's context.
                TOKEN_RANGE; a token id outside the vocabulary.
        """
        if not prompt:
            raise UsageError("PROMPT_EMPTY", "the prompt has no tokens", hint="give at least one token")
        sequence = Sequence(tuple(prompt), request)
        if sequence.limit > self.max_context:
            raise CompatibilityError("CONTEXT_LENGTH", "prompt and new tokens exceed the core's context",
                                     expected=f"at most {self.max_context}",
                                     got=f"{len(prompt)} + {request.max_tokens}", hint="ask for fewer tokens")
        vocab = self.core.manifest.contract.vocab_size
        wrong = [t for t in prompt if not 0 <= t < vocab]
        if wrong:
            raise CompatibilityError("TOKEN_RANGE", "token id outside the vocabulary", expected=f"0 to {vocab - 1}",
                                     got=wrong[:4], hint="encode the prompt with the core's own tokenizer")
        if self._pages_needed(sequence) > self.core.symbols["kv_pages"]:
            raise CompatibilityError("KV_PAGES", "the K/V cache is smaller than this sequence",
                                     expected=f"at most {self.core.symbols['kv_pages'] * self.page_tokens} tokens",
                                     got=sequence.limit)
        self._waiting.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not, and free what it holds."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence)

    def step(self) -> list[StepOutput]:
        """Admit what fits, run one prefill chunk and one step of every prefilled sequence; returns what came out."""
        self._admit()
        outputs = []
        ready = [s for s in self._running if s.prefilled == len(s.prompt)]
        prefilling = next((s for s in self._running if s.prefilled < len(s.prompt)), None)
        if prefilling is not None:
            outputs += self._prefill(prefilling)
        speculating = [s for s in ready if s.request.speculation and self._can_speculate]
        plain = [s for s in ready if not (s.request.speculation and self._can_speculate)]
        if speculating:
            outputs += self._verify(speculating)
        if plain:
            outputs += self._decode(plain)
        for output in outputs:
            if output.sequence.finish_reason is not None:
                self._running.remove(output.sequence)
                self._release(output.sequence)
        return outputs

    def _pages_needed(self, sequence: Sequence) -> int:
        return -(-sequence.limit // self.page_tokens)

    def _admit(self) -> None:
        while self._waiting and self._free_slots and self._pages_needed(self._waiting[0]) <= self.pages.available:
            sequence = self._waiting.popleft()
            sequence.slot = self._free_slots.pop()
            sequence.pages = self.pages.take(self._pages_needed(sequence))
            self._running.append(sequence)
            io, slot, request = self.core.io, sequence.slot, sequence.request
            io["length"][slot] = 0
            io["limit"][slot] = sequence.limit
            io["page_table"][slot] = 0
            io["page_table"][slot, :len(sequence.pages)] = sequence.pages
            io["temperature"][slot] = request.temperature
            io["top_p"][slot] = request.top_p
            io["top_k"][slot] = request.top_k
            io["seed"][slot] = request.seed

    def _release(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence.pages)
        sequence.pages = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _launch(self, role: str, sequences: list[Sequence]) -> None:
        graph = self.core.graph(role, len(sequences))
        slots = self.core.io["slots"]
        slots[:] = -1
        slots[:len(sequences)] = [s.slot for s in sequences]
        graph.run()

    def _prefill(self, sequence: Sequence) -> list[StepOutput]:
        io = self.core.io
        chunk = sequence.prompt[sequence.prefilled:sequence.prefilled + len(io["chunk_tokens"])]
        io["chunk_tokens"][:] = 0
        io["chunk_tokens"][:len(chunk)] = chunk
        io["chunk_count"][0] = len(chunk)
        self._launch("prefill", [sequence])
        sequence.prefilled += len(chunk)
        if sequence.prefilled < len(sequence.prompt):
            return []
        token = int(io["sampled"][0])
        return [StepOutput(sequence, sequence.commit(StepKind.PREFILL, sequence.prompt[-1], [token]))]

    def _decode(self, sequences: list[Sequence]) -> list[StepOutput]:
        anchors = [s.tokens[-1] for s in sequences]
        self._launch("decode", sequences)
        tokens = self.core.io["sampled"].tolist()
        return [StepOutput(s, s.commit(StepKind.DECODE, anchors[lane], [tokens[lane]]))
                for lane, s in enumerate(sequences)]

    def _verify(self, sequences: list[Sequence]) -> list[StepOutput]:
        io = self.core.io
        self._launch("draft", sequences)
        proposals, candidates = io["proposals"].tolist(), io["proposal_ids"].tolist()
        anchors = [s.tokens[-1] for s in sequences]
        self._launch("verify", sequences)
        emitted, produced, accepted = io["emitted"].tolist(), io["produced"].tolist(), io["accepted"].tolist()
        outputs = []
        for lane, sequence in enumerate(sequences):
            live = min(len(proposals[lane]), sequence.limit - len(sequence.prompt) - len(sequence.tokens))
            record = sequence.commit(
                StepKind.VERIFY, anchors[lane], emitted[lane][:produced[lane]],
                proposals=tuple(proposals[lane][:live]), candidates=tuple(tuple(c) for c in candidates[lane][:live]),
                accepted=accepted[lane])
            outputs.append(StepOutput(sequence, record))
        return outputs
