"""An image through a loaded core: file to patches, patches through the vision graph, rows kept on the device.

    encoder = VisionEncoder.of(core)
    image = encoder.patches(data)
    encoder.encode(image, first=0)            # rows 0 to image.tokens of the core's image_embeddings
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from dflash_core.errors import CompatibilityError, FormatError

from runtime.core import Core
from runtime.vision.decode import ImageLimits, decode_image
from runtime.vision.preprocess import ImagePatches, image_patches
from runtime.vision.settings import PREPROCESSOR_CONFIG, ImageSettings, read_image_settings
from runtime.vision.splice import placeholder_token

GROUP = 2  # patches along a side of the group that becomes one row

@dataclass(frozen=True, slots=True)
class VisionEncoder:
    """A core with vision, and how it takes images.

    Attributes:
        placeholder: the token that stands for an image in an encoded prompt.
        capacity: rows that its images may hold at a time.
        max_tokens: rows of its largest image.
    """

    core: Core
    settings: ImageSettings
    placeholder: int
    capacity: int
    max_tokens: int

    @classmethod
    def of(cls, core: Core) -> VisionEncoder:
        """What a core says of its vision.

        Raises:
            CompatibilityError: NO_VISION; it has none.
            FormatError: IMAGE_SETTINGS, IMAGE_TOKEN; it says what this runtime cannot follow.
        """
        if not core.manifest.HasField("vision"):
            raise CompatibilityError("NO_VISION", "this core has no vision", where=core.manifest.core_name,
                                     hint="leave out the images, or export the core with vision")
        capacity = core.shape("image_embeddings")[0]
        settings = read_image_settings(core.file(PREPROCESSOR_CONFIG))
        found, made = (core.shape("image_pixels")[1], GROUP), (3 * settings.patch_size**2, settings.merge_size)
        if found != made:
            raise FormatError("IMAGE_SETTINGS", "the core's image settings are not those of its graphs",
                              where=PREPROCESSOR_CONFIG,
                              expected=f"patches of {found[0]} values, {GROUP} x {GROUP} a token",
                              got=f"{made[0]} values, {made[1]} x {made[1]}", hint="export the core again")
        return cls(core, settings, placeholder_token(core.file("config.json")), capacity,
                   core.manifest.vision.max_image_tokens or capacity)

    def patches(self, data: bytes, limits: ImageLimits | None = None, where: str = "image") -> ImagePatches:
        """A PNG or JPEG as patches, scaled to what the core has room for. Raises as `decode_image`."""
        return image_patches(decode_image(data, limits, where), self.settings, self.max_tokens)

    def encode(self, image: ImagePatches, first: int) -> None:
        """Run the vision graph; the image's rows are then rows `first` to `first + image.tokens` of the core's
        image_embeddings, until they are written again.

        Raises:
            CompatibilityError: IMAGE_ROWS; they would not fit there. NO_GRAPH; the image has more patches than any
                bucket.
        """
        if not 0 <= first <= first + image.tokens <= self.capacity:
            raise CompatibilityError("IMAGE_ROWS", "an image's rows do not fit where they are to be kept",
                                     where=f"image of {image.width} x {image.height}",
                                     expected=f"within {self.capacity} rows", got=f"{image.tokens} rows from {first}",
                                     hint="let the prompts that hold images finish first, or send smaller images")
        graph = self.core.graph("vision", 1, len(image.levels))
        self.core.put("image_pixels", 0, bytearray(image.levels))
        self.core.put("image_grid", 0, [image.rows, image.cols])
        self.core.put("image_first", 0, [first])
        graph.run()

    def rows(self, first: int, count: int) -> npt.NDArray[np.float32]:
        """Rows of image_embeddings, [count, hidden], in fp32: for comparing, not for serving."""
        cols = self.core.shape("image_embeddings")[1]
        values = self.core.get("image_embeddings", first * cols, count * cols)
        return np.array(values, np.float32).reshape(count, cols)
