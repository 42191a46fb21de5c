"""Which rows of a core's image_embeddings are free, and what a prompt's images hold of them.

    images = PromptImages.of(encoder, tokens, [encoder.patches(data)])
    if images.place(encoder, pool):                      # all of a prompt's images, or none
        core.put("chunk_images", 0, images.sources(0, 64))
    images.release(pool)                                 # when the prompt is stored
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_core.errors import ImageError

from runtime.vision.encode import VisionEncoder
from runtime.vision.preprocess import ImagePatches
from runtime.vision.splice import SplicedPrompt, splice_images


class RowPool:
    """Hands out consecutive rows, from the lowest that fit."""

    def __init__(self, capacity: int) -> None:
        self._free = [(0, capacity)] if capacity else []  # (first, end), ascending, none touching another

    def take(self, count: int) -> int | None:
        """The first of `count` rows, or None while no gap is as long."""
        for index, (first, end) in enumerate(self._free):
            if end - first >= count:
                self._free[index:index + 1] = [(first + count, end)] if end - first > count else []
                return first
        return None

    def give_back(self, first: int, count: int) -> None:
        """Rows that `take` gave."""
        merged: list[tuple[int, int]] = []
        for start, end in sorted([*self._free, (first, first + count)]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged


@dataclass(slots=True)
class PromptImages:
    """The images of one prompt, from its admission until it is stored.

    Attributes:
        prompt: with as many placeholders as its images have rows.
        images: patches of each, in order.
        identities: what a prefix cache compares in place of the tokens.
    """

    prompt: SplicedPrompt
    images: tuple[ImagePatches, ...]
    identities: tuple[int, ...]
    _placed: list[tuple[int, int]] = field(default_factory=list)
    _firsts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, encoder: VisionEncoder, tokens: Sequence[int], images: Sequence[ImagePatches]) -> PromptImages:
        """Make room for images in an encoded prompt.

        Raises:
            ImageError: IMAGE_PLACEHOLDERS, as `splice_images`; IMAGE_ROOM, together they have more rows than the core
                ever holds.
        """
        prompt = splice_images(tokens, encoder.placeholder, [image.tokens for image in images])
        total = sum(image.tokens for image in images)
        if total > encoder.capacity:
            raise ImageError("IMAGE_ROOM", "the prompt's images have more tokens than this core holds", where="prompt",
                             expected=f"at most {encoder.capacity}", got=total, hint="send fewer or smaller images")
        digests = [hashlib.sha256(f"{image.rows} {image.cols} ".encode() + image.levels.tobytes()).digest()
                   for image in images]
        return cls(prompt, tuple(images), tuple(prompt.identities(digests)))

    def place(self, encoder: VisionEncoder, pool: RowPool, stored: int = 0) -> bool:
        """Encode every image that a prefill still meets; False, and nothing taken, while there is no room for all.

        Args:
            stored: tokens of the prompt that a cache has already; images that end there are not encoded again.
        """
        wanted = [span.start + span.count > stored for span in self.prompt.spans]
        taken: list[tuple[int, int]] = []
        firsts = []
        for image, needed in zip(self.images, wanted, strict=True):
            first = pool.take(image.tokens) if needed else 0
            if first is None:
                for back in taken:
                    pool.give_back(*back)
                return False
            firsts.append(first)
            if needed:
                taken.append((first, image.tokens))
        self._placed, self._firsts = taken, firsts
        for image, first, needed in zip(self.images, firsts, wanted, strict=True):
            if needed:
                encoder.encode(image, first)
        return True

    def sources(self, first: int, count: int) -> list[int]:
        """What `chunk_images` holds for tokens `first` to `first + count`, once placed."""
        return self.prompt.sources(first, count, self._firsts)

    def release(self, pool: RowPool) -> None:
        """Give the rows back; also after a failure, and more than once."""
        for back in self._placed:
            pool.give_back(*back)
        self._placed = []
