"""Images in a prompt: a placeholder token becomes one token per row of the image's embeddings.

    prompt = splice_images(tokens, placeholder=163605, counts=[64, 414])
    prompt.sources(0, 256, firsts=[0, 64])      # of a chunk: 0, or 1 + the row that a token stands for

The tokens keep the placeholder's id; what the model sees in their place are the image's rows. Pure functions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_core.errors import FormatError, ImageError


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Where an image stands in a prompt: `count` tokens from `start` on."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class SplicedPrompt:
    """A prompt with room for its images.

    Attributes:
        tokens: with as many placeholders as the images have rows.
        spans: one per image, in order.
    """

    tokens: tuple[int, ...]
    spans: tuple[ImageSpan, ...]

    def sources(self, first: int, count: int, firsts: Sequence[int]) -> list[int]:
        """What `chunk_images` holds for tokens `first` to `first + count`.

        Args:
            firsts: row of `image_embeddings` where each image begins.
        Returns:
            Per token: 0 for text, or 1 + the row that takes its place.
        """
        found = [0] * count
        for span, row in zip(self.spans, firsts, strict=True):
            start, stop = max(span.start, first), min(span.start + span.count, first + count)
            for position in range(start, stop):
                found[position - first] = 1 + row + position - span.start
        return found

    def identities(self, digests: Sequence[bytes]) -> list[int]:
        """What a prefix cache must compare: a token's id, or a negative number for each row of each image. All
        images have the same tokens, so that tokens alone would take one picture for another.

        Args:
            digests: of each image's patches and grid.
        """
        found = list(self.tokens)
        for span, digest in zip(self.spans, digests, strict=True):
            for row in range(span.count):
                at = hashlib.blake2b(digest + row.to_bytes(4, "little"), digest_size=7).digest()
                found[span.start + row] = -1 - int.from_bytes(at, "little")
        return found


def splice_images(tokens: Sequence[int], placeholder: int, counts: Sequence[int]) -> SplicedPrompt:
    """Replace each placeholder by as many as its image has rows.

    Args:
        tokens: the encoded prompt, one placeholder per image.
        counts: rows of each image, in the order of the prompt.
    Raises:
        ImageError: IMAGE_PLACEHOLDERS; as many placeholders as images there must be, so that no text can pass for one.
    """
    found = sum(token == placeholder for token in tokens)
    if found != len(counts):
        raise ImageError("IMAGE_PLACEHOLDERS", "the prompt has another number of image placeholders than images",
                         where="prompt", expected=len(counts), got=found,
                         hint="write one placeholder for each image, and none in the text")
    spliced: list[int] = []
    spans: list[ImageSpan] = []
    for token in tokens:
        if token != placeholder:
            spliced.append(token)
            continue
        count = counts[len(spans)]
        spans.append(ImageSpan(len(spliced), count))
        spliced += [placeholder] * count
    return SplicedPrompt(tuple(spliced), tuple(spans))


def image_text(width: int, height: int) -> str:
    """What stands in a rendered prompt for an image of width x height pixels, as it was sent; it encodes to one
    placeholder."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def placeholder_token(config: bytes | None) -> int:
    """The token that stands for an image, from a model's config.json.

    Raises:
        FormatError: IMAGE_TOKEN; the config names none.
    """
    try:
        token = json.loads(config or b"null")["media_placeholder_token_id"]
    except (ValueError, RecursionError, KeyError, TypeError):
        token = None
    if type(token) is not int or token < 0:
        raise FormatError("IMAGE_TOKEN", "the model's config names no token that stands for an image",
                          where="config.json", expected="media_placeholder_token_id, a token id", got=ascii(token)[:40],
                          hint="export the core again from a checkpoint with vision")
    return token
