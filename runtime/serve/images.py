"""Images in a chat: `data:` URIs to patches, and their place in the prompt.

    patches = await reader.read(engine, body.messages)
    images = placed(engine, tokens, patches)        # tokens: the rendered prompt, one placeholder per image

Nothing but the request's own bytes is ever read. Decoding runs beside the event loop, one request at a time, so that
large pictures neither hold up other clients nor add up in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.engine import Engine
from runtime.serve.errors import ApiError
from runtime.serve.protocol import ImagePart, Message

if TYPE_CHECKING:
    from runtime.vision.preprocess import ImagePatches
    from runtime.vision.rows import PromptImages

MAX_IMAGES = 16


class ImageReader:
    """Reads the images of one server's requests."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def read(self, engine: Engine, messages: Sequence[Message]) -> tuple[ImagePatches, ...]:
        """The patches of every image of a conversation, in order.

        Raises:
            ApiError: 400 when the core has no vision, or there are more than MAX_IMAGES.
            ImageError: as `decode_data_uri` and `decode_image`.
        """
        parts = [part for message in messages for part in message.images]
        if not parts:
            return ()
        if not engine.sees:
            raise ApiError.bad_request("this core has no vision: leave out the images", param="messages",
                                       code="unsupported_content")
        if len(parts) > MAX_IMAGES:
            raise ApiError.bad_request(f"{len(parts)} images are more than the {MAX_IMAGES} that a request may have",
                                       param="messages", code="too_many_images")
        async with self._turn:
            return await asyncio.to_thread(_patches, engine, parts)


def _patches(engine: Engine, parts: Sequence[ImagePart]) -> tuple[ImagePatches, ...]:
    from runtime.vision.decode import decode_data_uri

    return tuple(engine.encoder.patches(decode_data_uri(part.image_url.url), where=f"image {index + 1}")
                 for index, part in enumerate(parts))


def placed(engine: Engine, tokens: Sequence[int], images: Sequence[ImagePatches]) -> PromptImages | None:
    """A prompt's images where it has any; refuses text that passes itself off as one.

    Raises:
        ImageError: IMAGE_PLACEHOLDERS, IMAGE_ROOM.
    """
    if not engine.sees:
        return None
    from runtime.vision.rows import PromptImages

    found = PromptImages.of(engine.encoder, tokens, images)
    return found if images else None
