"""Single image files: more than eight bits a channel, and what is said of those that are left out."""

import errno

import datasets
import numpy as np
import pytest
from PIL import Image

from atrun.data import decoding
from atrun.data.decoding import decode, in_eight_bits
from atrun.data.photos import Decoded
from atrun.data.transforms import Augmentation
from tests.picture_files import encoded


def in_form(image, form):
    return {"bytes": encoded(image, form), "path": "ramp"}


def reds(image):
    return np.asarray(image)[..., 0].ravel()


@pytest.mark.parametrize(
    "kind, form", [(np.uint16, "PNG"), (np.uint16, "TIFF"), (">u2", "TIFF"), (np.int32, "TIFF")]
)
def test_sixteen_bits_become_eight_and_not_white(kind, form):
    """A ramp over all values: every grey is there equally often, and the order is kept."""
    ramp = np.arange(65536).reshape(256, 256)
    picture = decode(in_form(Image.fromarray(ramp.astype(kind)), form))
    assert picture.mode == "RGB" and np.array_equal(reds(picture), np.arange(65536) // 256)


def test_twelve_bits_in_sixteen_are_named():
    with pytest.warns(UserWarning, match="12 bits"):
        read = in_eight_bits(Image.fromarray(np.array([[0, 4095]], np.uint16)))
    assert np.asarray(read).tolist() == [[0, 15]], "as sixteen bits"


def test_values_that_fit_eight_bits_stay_as_they_are():
    low = np.array([[0, 7, 255]])
    for kind in (np.int32, np.float32, np.uint8):
        picture = Image.fromarray(low.astype(kind))
        assert reds(decode(in_form(picture, "TIFF"))).tolist() == [0, 7, 255], picture.mode
    half = Image.fromarray(np.array([[0, 0.5, 1]], dtype=np.float32))
    assert reds(decode(in_form(half, "TIFF"))).tolist() == [0, 128, 255]


@pytest.mark.parametrize("lacks", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
def test_what_the_system_lacks_is_no_damaged_image(monkeypatch, lacks):
    """Left out as corrupt, sound images would be missing from the epoch."""

    def fail(self, file):
        raise lacks

    monkeypatch.setattr(datasets.Image, "decode_example", fail)
    with pytest.raises(type(lacks)) as caught:
        decode({"bytes": b"", "path": None})
    assert caught.value is lacks


def test_a_large_photograph_is_read_and_pillows_limit_is_as_before(tmp_path, monkeypatch):
    """geti_v2#1486: a sound picture of 200 megapixels, which Pillow alone takes for an attack."""
    assert 2 * Image.MAX_IMAGE_PIXELS < 200e6 <= decoding.LARGEST
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 89)
    monkeypatch.setattr(decoding, "LARGEST", 500)
    Image.new("1", (20, 10)).save(tmp_path / "1.png")
    file = {"bytes": None, "path": str(tmp_path / "1.png")}
    augmentation = Augmentation(32, scale=(1, 1))
    made = Decoded((), augmentation, "raise").made([(0, file, 0, 1)])
    assert made.corrupt == {} and made.images.shape == (1, 3, 32, 32)
    assert Image.MAX_IMAGE_PIXELS == 89
