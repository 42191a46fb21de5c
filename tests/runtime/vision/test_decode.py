"""Every kind of PNG and JPEG becomes upright RGB or RGBA; everything else is refused by name, before it costs much."""

import base64
import io
import struct
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
from dflash_core.errors import ImageError

from runtime.vision.decode import ImageLimits, decode_data_uri, decode_image
from tests.oracles.drawn_images import drawn, jpeg_of, png, png_of

GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6
PLTE = (b"PLTE", bytes([10, 20, 30, 40, 50, 60, 70, 80, 90]))
PNG = png_of(drawn(40, 30))
JPEG = jpeg_of(drawn(40, 30))


def samples(*values):
    return struct.pack(f">{len(values)}H", *values)


@pytest.mark.parametrize(
    ("data", "mode", "expected"),
    [
        pytest.param(png(2, 1, 8, RGB, [bytes([1, 2, 3, 4, 5, 6])]), "RGB", [[1, 2, 3], [4, 5, 6]], id="rgb"),
        pytest.param(png(2, 1, 8, GREY, [bytes([7, 200])]), "RGB", [[7, 7, 7], [200, 200, 200]], id="grey"),
        pytest.param(png(2, 1, 1, GREY, [b"\x40"]), "RGB", [[0, 0, 0], [255, 255, 255]], id="one bit"),
        pytest.param(png(2, 1, 16, GREY, [samples(0x01FF, 0x8000)]), "RGB", [[1, 1, 1], [128, 128, 128]],
                     id="grey of 16 bits: the upper 8, not white"),
        pytest.param(png(1, 1, 16, RGB, [samples(0x01FF, 0x80FF, 0xFFFF)]), "RGB", [[1, 128, 255]],
                     id="rgb of 16 bits"),
        pytest.param(png(1, 1, 16, GREY_ALPHA, [samples(0x01FF, 0x80FF)]), "RGBA", [[1, 1, 1, 128]],
                     id="grey and alpha of 16 bits"),
        pytest.param(png(2, 1, 8, PALETTE, [bytes([2, 0])], PLTE), "RGB", [[70, 80, 90], [10, 20, 30]], id="palette"),
        pytest.param(png(2, 1, 8, PALETTE, [bytes([1, 0])], PLTE, (b"tRNS", bytes([255, 9]))), "RGBA",
                     [[40, 50, 60, 9], [10, 20, 30, 255]], id="palette with transparency"),
        pytest.param(png(2, 1, 8, RGB, [bytes([1, 2, 3, 4, 5, 6])], (b"tRNS", samples(4, 5, 6))), "RGBA",
                     [[1, 2, 3, 255], [4, 5, 6, 0]], id="one transparent colour"),
        pytest.param(png(1, 1, 8, GREY_ALPHA, [bytes([9, 128])]), "RGBA", [[9, 9, 9, 128]], id="grey and alpha"),
        pytest.param(png(1, 1, 8, RGBA, [bytes([1, 2, 3, 0])]), "RGBA", [[1, 2, 3, 0]], id="rgba"),
        pytest.param(jpeg_of(np.full((8, 8, 3), 128, np.uint8))[:], "RGB", [[128, 128, 128]] * 64, id="jpeg"),
    ],
)
def test_every_kind_of_pixel_becomes_rgb_or_rgba(data, mode, expected):
    picture = decode_image(data)

    assert picture.mode == mode
    assert np.asarray(picture).reshape(-1, len(mode)).tolist() == expected


def test_jpeg_of_four_inks_becomes_rgb():
    from PIL import Image

    out = io.BytesIO()
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(out, "JPEG", quality=95)

    red, green, blue = np.asarray(decode_image(out.getvalue()))[0, 0].tolist()

    assert (red > 245, green < 10, blue < 10) == (True, True, True)


# What a viewer does with each value of EXIF's Orientation: CIPA DC-008, "Orientation".
UPRIGHT = {
    1: lambda p: p, 2: np.fliplr, 3: lambda p: np.rot90(p, 2), 4: np.flipud, 5: lambda p: p.swapaxes(0, 1),
    6: lambda p: np.rot90(p, -1), 7: lambda p: np.rot90(p, 2).swapaxes(0, 1), 8: np.rot90,
}  # fmt: skip


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_picture_is_turned_as_the_camera_noted(orientation):
    stored = drawn(5, 3)
    exif = b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    data = png(5, 3, 8, RGB, [row.tobytes() for row in stored], (b"eXIf", exif))

    assert np.asarray(decode_image(data)).tolist() == UPRIGHT[orientation](stored).tolist()


def test_broken_exif_is_not_an_error_and_says_nothing(tmp_path):
    """In a process of its own, where pytest has not taken the warnings."""
    cut = b"II*\0" + struct.pack("<IHHH", 8, 3, 0x0112, 3)
    (tmp_path / "cut.png").write_bytes(png(1, 1, 8, RGB, [bytes(3)], (b"eXIf", cut)))
    code = ("import sys; from pathlib import Path; from runtime.vision.decode import decode_image\n"
            "print(decode_image(Path(sys.argv[1]).read_bytes()).size)")

    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "cut.png")], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("(1, 1)\n", "")


def test_without_pillow_the_error_says_what_to_install():
    code = "import sys; sys.modules['PIL'] = None; import runtime.vision.decode"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 1
    assert "ResourceError: Pillow is not installed" in done.stderr
    assert "hint: pip install 'dflash-cores[vision]'" in done.stderr


def header_of(width, height):
    """A PNG that promises pixels and has none."""
    return png(width, height, 8, RGB, [])


def with_text_bomb():
    """16 KB that unpack to 16 MB of text beside a sound picture."""
    text = b"note\0\0" + zlib.compress(bytes(16 << 20))
    return png(1, 1, 8, RGB, [bytes(3)], (b"zTXt", text))


@pytest.mark.parametrize(
    ("data", "code", "told"),
    [
        pytest.param(b"", "IMAGE_FORMAT", "got 0 bytes that start with nothing", id="empty"),
        pytest.param(b"hello, world", "IMAGE_FORMAT", "12 bytes that start with 68656c6c6f2c2077", id="text"),
        pytest.param(b"GIF89a" + bytes(40), "IMAGE_FORMAT", "expected PNG or JPEG", id="gif"),
        pytest.param(b"II*\0" + bytes(40), "IMAGE_FORMAT", "expected PNG or JPEG", id="tiff"),
        pytest.param(b"%!PS-Adobe-3.0 EPSF-3.0\n", "IMAGE_FORMAT", "expected PNG or JPEG", id="postscript"),
        pytest.param(PNG[:8], "IMAGE_DAMAGED", "ends early", id="signature alone"),
        pytest.param(PNG[:20], "IMAGE_DAMAGED", "ends early", id="half a header"),
        pytest.param(JPEG[:3], "IMAGE_DAMAGED", "ends early", id="start of a jpeg"),
        pytest.param(header_of(0, 5), "IMAGE_DAMAGED", "got SyntaxError", id="no width"),
        pytest.param(header_of(5, 0), "IMAGE_DAMAGED", "got SyntaxError", id="no height"),
        pytest.param(header_of(100_000, 100_000), "IMAGE_PIXELS",
                     "expected at most 51380224, got 100000 x 100000 = 10000000000", id="bomb"),
        pytest.param(header_of(7169, 7168), "IMAGE_PIXELS", "7169 x 7168 = 51387392", id="a column too many"),
        pytest.param(header_of(1, 100_000), "IMAGE_ASPECT", "expected sides of at most 200:1, got 1 x 100000",
                     id="1 x 100000"),
        pytest.param(header_of(201, 1), "IMAGE_ASPECT", "got 201 x 1", id="201 x 1"),
        pytest.param(header_of(7168, 7168), "IMAGE_DAMAGED", "ends early", id="largest square, without its pixels"),
        pytest.param(with_text_bomb(), "IMAGE_DAMAGED", "ends early", id="text that unpacks to 16 MB"),
        pytest.param(PNG[:60] + b"\xff" + PNG[61:], "IMAGE_DAMAGED", "damaged", id="a wrong byte"),
    ],
)
def test_refuses_by_name(data, code, told):
    with pytest.raises(ImageError) as refused:
        decode_image(data, where="image 1")

    assert refused.value.code == code
    assert told in str(refused.value)
    assert refused.value.where == "image 1"
    assert refused.value.hint
    assert str(refused.value).replace("\n", " ").isprintable()


def test_file_of_too_many_bytes_is_not_opened():
    with pytest.raises(ImageError, match=f"expected at most 100 bytes, got {len(PNG)}") as refused:
        decode_image(PNG, ImageLimits(max_bytes=100))

    assert refused.value.code == "IMAGE_BYTES"
    assert decode_image(PNG, ImageLimits(max_bytes=len(PNG))).size == (40, 30)


def test_what_is_refused_by_its_header_costs_no_memory():
    data = header_of(100_000, 100_000)
    tracemalloc.start()
    try:
        with pytest.raises(ImageError):
            decode_image(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1 << 20


@pytest.mark.parametrize(("whole", "spare"), [pytest.param(PNG, 20, id="png"), pytest.param(JPEG, 0, id="jpeg")])
def test_file_that_ends_early_is_refused_wherever_it_ends(whole, spare):
    """A PNG's pixels are whole before its last 20 bytes: two checksums and the chunk that says "end"."""
    expected = np.asarray(decode_image(whole)).tobytes()
    kept = []
    for length in range(len(whole)):
        try:
            picture = decode_image(whole[:length])
        except ImageError as refused:
            assert refused.code in ("IMAGE_FORMAT", "IMAGE_DAMAGED")
        else:
            kept.append(len(whole) - length)
            assert np.asarray(picture).tobytes() == expected

    assert kept == list(range(spare, 0, -1))


@pytest.mark.parametrize("whole", [pytest.param(PNG, id="png"), pytest.param(JPEG, id="jpeg")])
def test_damage_anywhere_is_a_picture_or_a_typed_error(whole):
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            data[place] = rng.integers(256)
        try:
            assert decode_image(bytes(data), ImageLimits(max_pixels=1 << 16)).mode in ("RGB", "RGBA")
        except ImageError:
            refused += 1

    assert refused > 30


def uri_of(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("kind", ["png", "jpeg", "jpg", "PNG"])
def test_data_uri_gives_its_bytes(kind):
    assert decode_data_uri(uri_of(b"any bytes", kind)) == b"any bytes"


@pytest.mark.parametrize(
    ("uri", "code"),
    [
        pytest.param("", "IMAGE_URI", id="empty"),
        pytest.param("https://example.com/cat.png", "IMAGE_URI", id="an address is not fetched"),
        pytest.param("file:///etc/passwd", "IMAGE_URI", id="a file is not read"),
        pytest.param("/etc/passwd", "IMAGE_URI", id="nor a path"),
        pytest.param("data:image/webp;base64,AAAA", "IMAGE_URI", id="another type"),
        pytest.param("data:image/png,AAAA", "IMAGE_URI", id="not base64"),
        pytest.param("data:image/png;charset=x;base64,AAAA", "IMAGE_URI", id="parameters"),
        pytest.param("data:image/png;base64,AAA", "IMAGE_URI", id="padding is missing"),
        pytest.param("data:image/png;base64,AA!A", "IMAGE_URI", id="a character that is none of base64's"),
        pytest.param("data:image/png;base64,AA AA", "IMAGE_URI", id="a space"),
        pytest.param("data:image/png;base64,ÄÄÄÄ", "IMAGE_URI", id="letters beyond ASCII"),
        pytest.param(uri_of(bytes(104)), "IMAGE_BYTES", id="too long"),
    ],
)
def test_refuses_uri(uri, code):
    with pytest.raises(ImageError) as refused:
        decode_data_uri(uri, ImageLimits(max_bytes=100))

    assert (refused.value.code, refused.value.where, bool(refused.value.hint)) == (code, "image_url", True)
    assert str(refused.value).replace("\n", " ").isprintable()


def test_long_uri_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))

    with pytest.raises(ImageError, match="expected at most 100 bytes"):
        decode_data_uri("data:image/png;base64," + "A" * 200, ImageLimits(max_bytes=100))
