"""Still images: identity and size from the header, pixels on demand."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any, Final

from PIL import Image

from lazydecode.errors import LazyDecodeError, MediaTooLargeError, ValidationError
from lazydecode.limits import DecodeLimits
from lazydecode.media.base import (
    DecodeSpec,
    ImageHeader,
    MediaIO,
    MediaRef,
    PayloadDigest,
    RefMaker,
    decode_base64,
)
from lazydecode.media.exif import get_image_id_bytes
from lazydecode.media.faults import corrupt_on_failure
from lazydecode.media.image_convert import IMAGE_MODES, has_transparency, orient, to_mode
from lazydecode.media.image_header import ImageFacts, count_gif_frames, read_usual_header
from lazydecode.media.image_open import open_image, read_image_facts
from lazydecode.media.jpeg_check import check_whole, draft

__all__ = ["IMAGE_DECODER", "ImageMediaIO", "get_image_id_bytes"]

IMAGE_DECODER: Final = "image/1"
"""What decodes, and the version of what it gives: part of every key, so a change of our output
changes the keys."""

JPEG_SCALES: Final = (1, 2, 4, 8)
"""What libjpeg can divide a picture's sides by while it decodes it."""

_FAILED: Final = "Failed to load image"


class ImageMediaIO(MediaIO[Image.Image]):
    """Decodes one picture, upright, in the mode that was asked for.

    Only the first frame of an animation or page of a document counts. What comes out holds
    pixels (and the palette of mode `P`) and no metadata, so nobody turns it a second time.

    Args:
        image_mode: Pillow mode of the result; None keeps the stored one.
        limits: How many pixels a picture may have. For TIFF, GIF and WebP Pillow's own limit
            (twice `PIL.Image.MAX_IMAGE_PIXELS`) holds as well.
        trust_exif_image_id: Take a UUID in EXIF ImageID as the whole identity. Who writes the
            file controls it: only where all clients trust each other.
        kwargs: Further options. `rgba_background_color` (default white) shows where pixels
            are transparent. `jpeg_scale` (1, 2, 4 or 8; default 1) decodes JPEGs at that part of
            their width and height, which changes pixels: the decoder leaves out frequencies
            instead of averaging. All others change nothing but the key.

    Raises:
        ValidationError: If an option is not valid.
    """

    def __init__(
        self,
        image_mode: str | None = "RGB",
        *,
        limits: DecodeLimits = DecodeLimits(),  # noqa: B008  # frozen
        trust_exif_image_id: bool = True,
        **kwargs: Any,
    ) -> None:
        if image_mode is not None and image_mode not in IMAGE_MODES:
            raise ValidationError(
                f"image_mode must be one of {sorted(IMAGE_MODES)}, got {image_mode!r}",
                parameter="image_mode",
                value=image_mode,
            )
        self.image_mode = image_mode
        self.limits = limits
        self.trust_exif_image_id = trust_exif_image_id
        self.kwargs = kwargs
        self.rgba_background_color = _parse_background(
            kwargs.get("rgba_background_color", (255, 255, 255))
        )
        self.jpeg_scale = _parse_scale(kwargs.get("jpeg_scale", 1))
        if self.jpeg_scale == 1:
            kwargs.pop("jpeg_scale", None)  # so that saying what is the case keeps the key
        settings = {
            **kwargs,
            "decoder": IMAGE_DECODER,
            "image_mode": image_mode,
            "rgba_background_color": list(self.rgba_background_color),
        }
        try:
            self._spec = DecodeSpec(settings)
        except (TypeError, ValueError) as exc:
            raise ValidationError(f"image options: {exc}", parameter="media_io_kwargs") from exc

    def get_decode_spec(self) -> DecodeSpec:
        """All options, with the mode and the background as they are used."""
        return self._spec

    def option_names(self) -> frozenset[str]:
        """Names of all options that mean something here."""
        return frozenset({"image_mode", "jpeg_scale", "rgba_background_color"})

    def identity_scope(self) -> Hashable | None:
        """The options, the limits, and whether an ImageID counts."""
        if type(self) is not ImageMediaIO:
            return None  # a subclass may go by more
        return (ImageMediaIO, self._spec, self.limits, self.trust_exif_image_id)

    def ref_at_once(self, data: bytes) -> RefMaker[Image.Image] | None:
        """Not None for a header that is read here, and is no longer than headers are."""
        if type(self) is not ImageMediaIO:
            return None
        facts = read_usual_header(data)
        return None if facts is None else partial(self._new_ref, data, facts)

    def probe_header(self, data: bytes) -> ImageHeader | None:
        """Size as decoded, upright, stored mode, format and frames; None if it does not parse."""
        try:
            with corrupt_on_failure(_FAILED):
                return self._header(read_image_facts(data), data)
        except LazyDecodeError:
            return None

    def load_bytes(self, data: bytes) -> Image.Image:
        """Decode `data`.

        Raises:
            CorruptMediaError: If it is damaged, cut off, or of a format that is not accepted.
            MediaTooLargeError: If it has more pixels than the limit.
        """
        with corrupt_on_failure(_FAILED):
            facts = read_image_facts(data)
        self._check_size(facts)
        return self._decode(data, facts)

    def load_base64(self, media_type: str, data: str) -> Image.Image:
        """Decode base64 text; the media type is not looked at, the bytes say what they are."""
        return self.load_bytes(decode_base64(data))

    def load_file(self, filepath: Path) -> Image.Image:
        """Decode a file."""
        return self.load_bytes(filepath.read_bytes())

    def load_bytes_ref(
        self, data: bytes, *, digest: PayloadDigest | None = None
    ) -> MediaRef[Image.Image]:
        """Return a ref over `data`, whose header is read now and whose pixels are not.

        A header that does not parse is left for the decode, where it fails with the others.

        Raises:
            MediaTooLargeError: If the header states more pixels than the limit.
        """
        try:
            with corrupt_on_failure(_FAILED):
                facts = read_image_facts(data)
        except MediaTooLargeError:
            raise
        except LazyDecodeError:
            key = (digest or PayloadDigest(data)).key(self._spec)
            return MediaRef(
                partial(self.load_bytes, data),
                data,
                self._spec,
                key=key,
                recipe=self.recipe(self._spec),
            )
        return self._new_ref(data, facts, digest)

    def _new_ref(
        self, data: bytes, facts: ImageFacts, digest: PayloadDigest | None
    ) -> MediaRef[Image.Image]:
        self._check_size(facts)
        image_id = facts.image_id if self.trust_exif_image_id else None
        # The header is known now, unless frames have to be counted through the whole file.
        is_known = facts.num_frames is not None
        return MediaRef(
            partial(self._decode, data, facts),
            data,
            self._spec,
            key=image_id or (digest or PayloadDigest(data)).key(self._spec),
            header_probe=None if is_known else partial(self._header, facts, data),
            header=self._header(facts, data) if is_known else None,
            key_covers_spec=image_id is None,
            recipe=self.recipe(self._spec),
        )

    def _check_size(self, facts: ImageFacts) -> None:
        limit = self.limits.max_image_pixels
        if limit and facts.width * facts.height > limit:
            raise MediaTooLargeError(
                f"the image's {facts.width} x {facts.height} pixels exceed the limit of "
                f"{limit} pixels; send a smaller one",
                parameter="max_image_pixels",
                value=facts.width * facts.height,
            )

    def _scale(self, facts: ImageFacts) -> int:
        """By what the width and the height are divided; no side becomes less than a pixel."""
        if self.jpeg_scale == 1 or facts.format not in ("JPEG", "MPO"):
            return 1
        shortest = min(facts.width, facts.height)
        return max(s for s in JPEG_SCALES if s == 1 or s <= min(self.jpeg_scale, shortest))

    def _header(self, facts: ImageFacts, data: bytes) -> ImageHeader:
        width, height = _scaled_size(facts, self._scale(facts))
        num_frames = facts.num_frames
        if num_frames is None:
            num_frames = count_gif_frames(data)
        return ImageHeader(width, height, facts.mode, facts.format, num_frames)

    def _decode(self, data: bytes, facts: ImageFacts) -> Image.Image:
        with corrupt_on_failure(_FAILED):
            try:
                opened = open_image(data)
                scale = self._scale(facts)
                if scale > 1:
                    draft(opened, scale)
                opened.load()
            except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
                raise MediaTooLargeError("the image's pixels exceed the decoder's limit") from exc
            if opened.format == "JPEG":
                check_whole(data, opened, scale=scale)
            upright = orient(opened, facts.orientation)
            if upright.size != (stated := _scaled_size(facts, scale)):
                found = upright.size
                raise ValueError(f"the header states {stated}, the picture has {found} pixels")
            image = to_mode(upright, self.image_mode, self.rgba_background_color)
            return _without_metadata(image)


def _scaled_size(facts: ImageFacts, scale: int) -> tuple[int, int]:
    width, height = facts.oriented_size
    return -(-width // scale), -(-height // scale)


def _parse_scale(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value in JPEG_SCALES:
        return value
    raise ValidationError(
        f"jpeg_scale must be one of {list(JPEG_SCALES)}, got {value!r}",
        parameter="jpeg_scale",
        value=value,
    )


def _parse_background(value: object) -> tuple[int, int, int]:
    if (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(isinstance(part, int) and 0 <= part <= 255 for part in value)
    ):
        red, green, blue = value
        return int(red), int(green), int(blue)
    raise ValidationError(
        f"rgba_background_color must be a list of three integers in 0..255, got {value!r}",
        parameter="rgba_background_color",
        value=value,
    )


def _without_metadata(image: Image.Image) -> Image.Image:
    """A plain image over the same pixels: no EXIF, no profile, no file behind it."""
    plain = image._new(image.im)
    key = image.info.get("transparency")
    plain.info = {} if key is None or not has_transparency(plain) else {"transparency": key}
    return plain
