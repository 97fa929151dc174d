"""A video is its bytes: nothing else is opened, and what the bytes claim costs nothing."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazydecode.errors import CorruptMediaError, LazyDecodeError
from lazydecode.media import AudioMediaIO, ImageMediaIO, VideoMediaIO
from lazydecode.media.mp4_boxes import check_sample_counts, read_video_tracks
from tests.builders_video import make_video, turn, with_index_first

BACKENDS = ["pyav", "opencv"]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def references(target: str) -> dict[str, bytes]:
    """Return files of formats that refer to `target`."""
    return {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{target}\n#EXT-X-ENDLIST\n".encode(),
        "hls, blank first": f"\n#EXTM3U\n#EXTINF:2,\n{target}\n#EXT-X-ENDLIST\n".encode(),
        "concat": f"ffconcat version 1.0\nfile '{target}'\n".encode(),
        "dash": (
            '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
            'mediaPresentationDuration="PT2S"><Period><AdaptationSet mimeType="video/mp4">'
            f'<Representation id="1" bandwidth="1"><BaseURL>{target}</BaseURL></Representation>'
            "</AdaptationSet></Period></MPD>"
        ).encode(),
        "smooth streaming": f'<SmoothStreamingMedia Url="{target}"/>'.encode(),
        "sdp": b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nc=IN IP4 127.0.0.1\r\nm=video 9 RTP/AVP 96\r\n",
        "asx": f'<asx version="3.0"><entry><ref href="{target}"/></entry></asx>'.encode(),
        "subtitles": b"1\n00:00:00,000 --> 00:00:02,000\nhello\n",
        "vobsub": b"# VobSub index file, v7 (do not modify this line!)\n",
        "url text": target.encode(),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", references(""))
def test_reference_to_a_server_is_never_followed(
    name: str, backend: str, listener: socket.socket
) -> None:
    port = listener.getsockname()[1]
    data = references(f"http://127.0.0.1:{port}/clip.mp4")[name]
    io = VideoMediaIO(ImageMediaIO(), video_backend=backend)
    with pytest.raises(CorruptMediaError):
        io.load_bytes(data)
    assert io.probe_header(data) is None
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", references(""))
@pytest.mark.parametrize("scheme", ["", "file:", "subfile,,start,0,end,0,,:"])
def test_reference_to_a_file_is_never_followed(
    name: str, backend: str, scheme: str, tmp_path: Path
) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(make_video(3))
    io = VideoMediaIO(ImageMediaIO(), video_backend=backend)
    assert len(io.load_file(path)[0]) == 3
    with pytest.raises(CorruptMediaError) as caught:
        io.load_bytes(references(f"{scheme}{path}")[name])
    assert str(tmp_path) not in str(caught.value)


def test_movie_with_an_external_track_reads_no_other_file(tmp_path: Path) -> None:
    # The data reference says: not in this file, but there.
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(make_video(3))
    data = with_index_first(make_video(3))
    at = data.index(b"url \0\0\0\1")
    patched = data[: at + 4] + b"\0\0\0\0" + data[at + 8 :]
    io = VideoMediaIO(ImageMediaIO())
    try:
        frames, _ = io.load_bytes(patched)
    except LazyDecodeError:
        return
    assert len(frames) == 3  # its own frames


# -- tables that lie


def with_samples(count: int, *, size: int = 1) -> bytes:
    """Return an MP4 whose tables announce `count` equal samples."""
    data = bytearray(make_video(20, b_frames=0))
    at = data.index(b"stsz")
    data[at + 8 : at + 16] = struct.pack(">2I", size, count)
    at = data.index(b"stsc")
    data[at + 8 : at + 24] = struct.pack(">4I", 1, 1, count, 1)
    at = data.index(b"stts")
    data[at + 12 : at + 16] = struct.pack(">I", count)
    return bytes(data)


@pytest.mark.parametrize("count", [5_000_000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_announced_samples_cost_no_memory(count: int) -> None:
    code = (
        "import resource, sys; sys.path.insert(0, '.')\n"
        "from tests.media.test_video_safety import with_samples\n"
        "from lazydecode.errors import CorruptMediaError\n"
        "from lazydecode.media import ImageMediaIO, VideoMediaIO\n"
        "io = VideoMediaIO(ImageMediaIO())\n"
        "data = with_samples(1000)\n"
        "io.probe_header(data)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"data = with_samples({count})\n"
        "try:\n    io.load_bytes(data)\nexcept CorruptMediaError as exc:\n    print(exc)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    text, grown_kib = done.stdout.splitlines()
    assert f"announces {count} samples" in text
    assert int(grown_kib) < 64 * 1024


def test_sound_of_a_lying_file_is_refused_too() -> None:
    with pytest.raises(CorruptMediaError, match="announces 5000000 samples"):
        AudioMediaIO().load_bytes(with_samples(5_000_000))


def test_sample_tables_are_found_wherever_they_are_nested() -> None:
    table = struct.pack(">I4s3I", 20, b"stsz", 0, 1, 10_000_000)
    nested = table
    for kind in (b"stbl", b"minf", b"edts", b"mdia", b"trak", b"moov"):
        nested = struct.pack(">I4s", len(nested) + 8, kind) + nested
    with pytest.raises(CorruptMediaError, match="announces 10000000 samples"):
        check_sample_counts(nested)
    fragment = struct.pack(">I4s2I", 16, b"trun", 0, 10_000_000)
    for kind in (b"traf", b"moof"):
        fragment = struct.pack(">I4s", len(fragment) + 8, kind) + fragment
    with pytest.raises(CorruptMediaError, match="announces 10000000 samples"):
        check_sample_counts(struct.pack(">I4sI", 12, b"ftyp", 0) + fragment)


def test_compressed_or_endlessly_nested_boxes_are_refused() -> None:
    with pytest.raises(CorruptMediaError, match="compressed or nested"):
        check_sample_counts(struct.pack(">I4sI4sI", 20, b"moov", 12, b"cmov", 0))
    nested = b""
    for _ in range(50):
        nested = struct.pack(">I4s", len(nested) + 8, b"moov") + nested
    with pytest.raises(CorruptMediaError, match="compressed or nested"):
        check_sample_counts(nested)


def test_true_sample_tables_pass() -> None:
    check_sample_counts(make_video(50, audio=True))
    check_sample_counts(
        make_video(50, gop=5, muxer_options={"movflags": "frag_keyframe+empty_moov"})
    )
    check_sample_counts(b"")
    check_sample_counts(b"\0\0\0\1moov")
    check_sample_counts(b"\x1aE\xdf\xa3" * 10)


@pytest.mark.parametrize("size", range(0, 700, 23))
def test_cut_boxes_are_read_as_far_as_they_go(size: int) -> None:
    data = with_index_first(turn(make_video(3), 90))
    assert [track.width for track in read_video_tracks(data)] == [64]
    for track in read_video_tracks(data[:size]):
        assert track.width in (0, 64)
    check_sample_counts(data[:size])
