"""The loop that drives a core: admit sequences, prefill in chunks, then draft and verify (or decode) until done.

    engine = Engine(core)
    completion = engine.generate(prompt_ids, Request(max_tokens=64, stop_token_ids=(2,)))

All that changes between steps lives in the core's buffers. The host writes a sequence's page table, limit and sampling
settings once, names the lanes of each launch in `slots`, and reads the produced tokens after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_core.errors import CompatibilityError, QualityError, UsageError

from runtime.core import Core
from runtime.engine.pages import PagePool
from runtime.engine.prefix import Node, PrefixCache
from runtime.engine.sequence import Completion, Request, Sequence, StepKind, StepRecord, TokenLogprob

if TYPE_CHECKING:
    from runtime.vision.encode import VisionEncoder
    from runtime.vision.rows import PromptImages, RowPool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step did for one sequence."""

    sequence: Sequence
    record: StepRecord


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one engine step spent its time, in seconds; `total_s` minus the parts is the host's.

    Launches on a GPU do not wait: there the draft's time is part of the first read after it, which is verify's.
    """

    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0

    @property
    def host_s(self) -> float:
        """Admission, buffers and bookkeeping."""
        return self.total_s - self.prefill_s - self.draft_s - self.verify_s - self.decode_s


class Engine:
    """Runs sequences on a loaded core. Sequences join and leave between steps; what else is in the batch never
    changes a sequence's tokens.

    Args:
        record_candidates: read proposals and candidates of each step for its record; without, both are empty there,
            and nothing but the produced tokens crosses from the device.

    Attributes:
        times: of the last step.
        prefix: prompts that were seen, for a core that takes snapshots of its recurrent states; else None.
    """

    def __init__(self, core: Core, *, record_candidates: bool = True) -> None:
        self.core = core
        self._record_candidates = record_candidates
        contract = core.manifest.contract
        self.page_tokens: int = contract.page_tokens
        self.max_context: int = contract.max_context
        self.max_batch: int = contract.max_batch
        self.pages = PagePool(core.symbols["kv_pages"])
        snapshots = core.symbols.get("snapshots", 0)
        self.prefix = PrefixCache(self.page_tokens, snapshots) if snapshots else None
        self.times = StepTimes()
        self._spent: dict[str, float] = {}
        self._free_slots = list(range(self.max_batch - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._max_pages = core.shape("page_table")[1]
        (self._chunk_tokens,) = core.shape("chunk_tokens")
        self._can_speculate = any(binding.name == "proposal_ids" for binding in contract.io)
        self._depth, self._candidates = core.shape("proposal_ids")[1:] if self._can_speculate else (0, 0)
        self.sees = any(binding.name == "chunk_images" for binding in contract.io)
        self._encoder: VisionEncoder | None = None
        self._rows: RowPool | None = None

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot or for pages."""
        return len(self._waiting)

    @property
    def depth(self) -> int:
        """Proposals per step; 0 without a draft."""
        return self._depth

    @property
    def encoder(self) -> VisionEncoder:
        """How the core takes images; needs Pillow.

        Raises:
            CompatibilityError: NO_VISION. FormatError: as `VisionEncoder.of`.
        """
        if self._encoder is None:
            from runtime.vision.encode import VisionEncoder
            from runtime.vision.rows import RowPool

            self._encoder = VisionEncoder.of(self.core)
            self._rows = RowPool(self._encoder.capacity)
        return self._encoder

    def generate(self, prompt: SequenceOf[int], request: Request,
                 on_step: Callable[[StepRecord], None] | None = None, images: PromptImages | None = None) -> Completion:
        """Run one prompt to its end, with nothing else in the batch.

        Args:
            prompt: token ids, at least one.
            images: of `prompt`, whose tokens are then `images.prompt.tokens`.
            on_step: told each step's record as it is committed.
        """
        sequence = self.add(prompt, request, images)
        try:
            while sequence.finish_reason is None:
                for output in self.step():
                    if on_step is not None and output.sequence is sequence:
                        on_step(output.record)
        finally:
            self.abort(sequence)
        return sequence.completion()

    def add(self, prompt: SequenceOf[int], request: Request, images: PromptImages | None = None) -> Sequence:
        """Queue a prompt, with its images where it has any. Raises as `check`."""
        self.check(prompt, request)
        assert images is None or tuple(prompt) == images.prompt.tokens
        sequence = Sequence(tuple(prompt), request, images)
        self._waiting.append(sequence)
        return sequence

    def check(self, prompt: SequenceOf[int], request: Request) -> None:
        """Whether the core could ever run this; reads nothing that a step changes, so any thread may ask.

        Raises:
            UsageError: PROMPT_EMPTY.
            CompatibilityError: CONTEXT_LENGTH; prompt and new tokens do not fit the core's context.
                TOKEN_RANGE; a token id outside the vocabulary.
                KV_PAGES; the K/V cache is smaller than the sequence.
        """
        if not prompt:
            raise UsageError("PROMPT_EMPTY", "the prompt has no tokens", where="prompt",
                             hint="give at least one token")
        tokens = len(prompt) + request.max_tokens
        if tokens > self.max_context:
            raise CompatibilityError("CONTEXT_LENGTH", "prompt and new tokens exceed the core's context",
                                     where="prompt and max_tokens", expected=f"at most {self.max_context}",
                                     got=f"{len(prompt)} + {request.max_tokens}", hint="ask for fewer tokens")
        vocab = self.core.manifest.contract.vocab_size
        wrong = [t for t in prompt if not 0 <= t < vocab]
        if wrong:
            raise CompatibilityError("TOKEN_RANGE", "token id outside the vocabulary", expected=f"0 to {vocab - 1}",
                                     got=wrong[:4], hint="encode the prompt with the core's own tokenizer")
        if -(-tokens // self.page_tokens) > self.core.symbols["kv_pages"]:
            raise CompatibilityError("KV_PAGES", "the K/V cache is smaller than this sequence",
                                     expected=f"at most {self.core.symbols['kv_pages'] * self.page_tokens} tokens",
                                     got=tokens)

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not, and free what it holds."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence)

    def step(self) -> list[StepOutput]:
        """Admit what fits, run one prefill chunk and one step of every prefilled sequence; returns what came out."""
        started = time.perf_counter()
        self._spent = {}
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
        self.times = StepTimes(**{f"{part}_s": spent for part, spent in self._spent.items()},
                               total_s=time.perf_counter() - started)
        return outputs

    def _pages_needed(self, sequence: Sequence) -> int:
        return -(-sequence.limit // self.page_tokens)

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            prefix = self.prefix.match(sequence.prompt) if self._reusable(sequence) and self.prefix else None
            if not self._take_pages(sequence, prefix):
                return
            try:
                placed = self._place_images(sequence)
            except BaseException:
                self._give_back_pages(sequence)
                raise
            if not placed:
                self._give_back_pages(sequence)
                return
            self._waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self._running.append(sequence)
            put, slot, request = self.core.put, sequence.slot, sequence.request
            put("length", slot, [sequence.taken_over])
            put("limit", slot, [sequence.limit])
            put("page_table", slot * self._max_pages, sequence.pages + [0] * (self._max_pages - len(sequence.pages)))
            put("temperature", slot, [request.temperature])
            put("top_p", slot, [request.top_p])
            put("top_k", slot, [request.top_k])
            put("seed", slot, [request.seed])
            if prefix is not None and prefix.snapshot is not None:
                self._copy_state("restore", sequence, prefix.snapshot)

    def _take_pages(self, sequence: Sequence, prefix: Node | None) -> bool:
        """Give a sequence its pages: those of a prefix that was seen, and its own for the rest; False when there are
        not enough, even without what the cache can spare."""
        shared = [node.page for node in prefix.path()][::-1] if prefix is not None else []
        if self.prefix is not None and prefix is not None:
            self.prefix.hold(prefix)
        count = self._pages_needed(sequence) - len(shared)
        missing = count - self.pages.available
        if missing > (0 if self.prefix is None else self.prefix.evictable()):
            if self.prefix is not None and prefix is not None:
                self.prefix.release(prefix)
            return False
        if self.prefix is not None and missing > 0:
            self.pages.give_back(self.prefix.evict(missing))
        sequence.pages = shared + self.pages.take(count)
        sequence.prefix, sequence.shared_pages = prefix, set(shared)
        sequence.prefilled = sequence.taken_over = prefix.depth if prefix is not None else 0
        return True

    def _reusable(self, sequence: Sequence) -> bool:
        """Whether a prompt may share pages with others: equal tokens say nothing of the images that they stand for."""
        return self.prefix is not None and sequence.images is None

    def _give_back_pages(self, sequence: Sequence) -> None:
        self.pages.give_back([page for page in sequence.pages if page not in sequence.shared_pages])
        if self.prefix is not None and sequence.prefix is not None:
            self.prefix.release(sequence.prefix)
        sequence.pages, sequence.prefix, sequence.shared_pages = [], None, set()

    def _remember(self, sequence: Sequence) -> None:
        """File the pages of a prompt up to where it was run, and a snapshot of the state there."""
        assert self.prefix is not None
        node, taken = self.prefix.extend(sequence.prefix, sequence.prompt, sequence.prefilled, sequence.pages)
        sequence.prefix = node
        sequence.shared_pages |= set(taken)
        place = self.prefix.place_snapshot(node)
        if place is not None:
            self._copy_state("save", sequence, place)

    def _copy_state(self, role: str, sequence: Sequence, place: int) -> None:
        self.core.put("snapshot", 0, [place])
        self.core.put("slots", 0, [sequence.slot] + [-1] * (self.max_batch - 1))
        self.core.graph(role, 1).run()

    def _place_images(self, sequence: Sequence) -> bool:
        """Encode a prompt's images; False while other prompts' take the room."""
        if sequence.images is None:
            return True
        started = time.perf_counter()
        encoder, rows = self.encoder, self._rows
        assert rows is not None
        placed = sequence.images.place(encoder, rows)
        self._took("prefill", started)
        return placed

    def _release_images(self, sequence: Sequence) -> None:
        if sequence.images is not None and self._rows is not None:
            sequence.images.release(self._rows)

    def _release(self, sequence: Sequence) -> None:
        self._release_images(sequence)
        self._give_back_pages(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _launch(self, role: str, sequences: list[Sequence]) -> None:
        graph = self.core.graph(role, len(sequences))
        self.core.put("slots", 0, [s.slot for s in sequences] + [-1] * (self.max_batch - len(sequences)))
        started = time.perf_counter()
        graph.run()
        self._took(role, started)

    def _took(self, part: str, started: float) -> None:
        self._spent[part] = self._spent.get(part, 0.0) + time.perf_counter() - started

    def _logprobs(self, sequence: Sequence, first_row: int, tokens: SequenceOf[int]) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the tokens that logits rows first_row and on chose, if the request asks for them."""
        if sequence.request.top_logprobs is None:
            return ()
        from runtime.engine.logprobs import token_logprobs

        return token_logprobs(self.core, first_row, tokens, sequence.request.top_logprobs)

    def _prefill(self, sequence: Sequence) -> list[StepOutput]:
        chunk = sequence.prompt[sequence.prefilled:self._chunk_end(sequence)]
        self.core.put("chunk_tokens", 0, [*chunk, *[0] * (self._chunk_tokens - len(chunk))])
        self.core.put("chunk_count", 0, [len(chunk)])
        if self.sees:
            images = sequence.images
            self.core.put("chunk_images", 0, [0] * self._chunk_tokens if images is None else
                          images.sources(sequence.prefilled, self._chunk_tokens))
        self._launch("prefill", [sequence])
        sequence.prefilled += len(chunk)
        if self._reusable(sequence) and sequence.prefilled % self.page_tokens == 0:
            self._remember(sequence)
        if sequence.prefilled < len(sequence.prompt):
            return []
        self._release_images(sequence)
        self._produced([sequence], "prefill")
        tokens = self.core.get("sampled", 0, 1)
        return [StepOutput(sequence, sequence.commit(StepKind.PREFILL, sequence.prompt[-1], tokens,
                                                     logprobs=self._logprobs(sequence, 0, tokens)))]

    def _chunk_end(self, sequence: Sequence) -> int:
        """Where a prompt's next chunk ends: where a snapshot may be filed, at the last page border that it reaches."""
        end = min(sequence.prefilled + self._chunk_tokens, len(sequence.prompt))
        border = end - end % self.page_tokens
        return border if self._reusable(sequence) and border > sequence.prefilled else end

    def _decode(self, sequences: list[Sequence]) -> list[StepOutput]:
        anchors = [s.tokens[-1] for s in sequences]
        self._launch("decode", sequences)
        self._produced(sequences, "decode")
        tokens = self.core.get("sampled", 0, len(sequences))
        return [StepOutput(s, s.commit(StepKind.DECODE, anchors[lane], [tokens[lane]],
                                       logprobs=self._logprobs(s, lane, [tokens[lane]])))
                for lane, s in enumerate(sequences)]

    def _verify(self, sequences: list[Sequence]) -> list[StepOutput]:
        lanes, depth = len(sequences), self._depth
        self._launch("draft", sequences)
        anchors = [s.tokens[-1] for s in sequences]
        self._launch("verify", sequences)
        produced = self._produced(sequences, "verify")
        emitted = self.core.get("emitted", 0, lanes * (1 + depth))
        accepted = self.core.get("accepted", 0, lanes)
        proposals, candidates = self._drafted(sequences)
        outputs = []
        for lane, sequence in enumerate(sequences):
            block = lane * (1 + depth)
            tokens = emitted[block:block + produced[lane]]
            record = sequence.commit(StepKind.VERIFY, anchors[lane], tokens, proposals=proposals[lane],
                                     candidates=candidates[lane], accepted=accepted[lane],
                                     proposed=self._live_proposals(sequence),
                                     logprobs=self._logprobs(sequence, block, tokens))
            outputs.append(StepOutput(sequence, record))
        return outputs

    def _live_proposals(self, sequence: Sequence) -> int:
        """How many proposals take part in the next verify step: those below the sequence's limit."""
        return min(self._depth, sequence.limit - len(sequence.prompt) - len(sequence.tokens))

    def _produced(self, sequences: list[Sequence], part: str) -> list[int]:
        """How many tokens the last launch produced, by lane; waiting for them is part of its time.

        Raises:
            QualityError: LOGITS_NOT_FINITE; a device graph marks a lane whose highest logit is not finite with -1.
        """
        started = time.perf_counter()
        produced = self.core.get("produced", 0, len(sequences))
        self._took(part, started)
        for lane, sequence in enumerate(sequences):
            if produced[lane] < 0:
                raise QualityError("LOGITS_NOT_FINITE", "the target's highest logit is not finite",
                                   where=f"request slot {sequence.slot}",
                                   hint="compare the core's precision with its checkpoint: an activation overflowed")
        return produced

    def _drafted(
        self, sequences: list[Sequence]
    ) -> tuple[list[tuple[int, ...]], list[tuple[tuple[int, ...], ...]]]:
        """Proposals that took part in the step and the candidates of each, by lane; empty unless they are recorded."""
        lanes, depth, width = len(sequences), self._depth, self._candidates
        if not self._record_candidates:
            return [()] * lanes, [()] * lanes
        ids = self.core.get("proposals", 0, lanes * depth)
        chosen_among = self.core.get("proposal_ids", 0, lanes * depth * width)
        proposals, candidates = [], []
        for lane, sequence in enumerate(sequences):
            rows = range(lane * depth, lane * depth + self._live_proposals(sequence))
            proposals.append(tuple(ids[row] for row in rows))
            candidates.append(tuple(tuple(chosen_among[row * width:(row + 1) * width]) for row in rows))
        return proposals, candidates
