"""Images as a core takes them: decoded, resized, cut into patches, run through the vision graph, spliced into a prompt.

    processor = ImageProcessor.of(core)
    image = processor.patches(read_image("data:image/png;base64,…"))
    rows = encode_image(core, image, first_row=0)

Needs Pillow: the extra `vision`.
"""
