"""What cores can do at most: bare decoder and processor in a process per core, which share nothing.

`python -m lazydecode.bench.bare_work MODEL`: each line of its input is a number of pictures to
decode and to process; it answers each with the seconds that took.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from lazydecode.bench.media import encode_picture


class BareWorkers:
    """Processes that work on their own, one per core.

    Args:
        model: Folder of the model whose image processor is called.
        cores: Where they run, one on each.
    """

    def __init__(self, model: str, cores: Sequence[int]) -> None:
        command = [sys.executable, "-m", "lazydecode.bench.bare_work", model]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(  # noqa: S603  # our own words
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            for _ in cores
        ]
        for process, core in zip(self._processes, cores, strict=True):
            os.sched_setaffinity(process.pid, [core])

    def rate(self, num_processes: int, num_pictures: int) -> float:
        """Return the pictures per second of so many processes, each of which does as many.

        Raises:
            RuntimeError: If one has ended.
        """
        chosen = self._processes[:num_processes]
        for process in chosen:
            with contextlib.suppress(BrokenPipeError):  # it says nothing then
                _end(process.stdin).write(f"{num_pictures}\n")
                _end(process.stdin).flush()
        lines = [_end(process.stdout).readline() for process in chosen]
        if not all(lines):
            raise RuntimeError("a process of bare work has ended; see what it said above")
        return sum(num_pictures / float(line) for line in lines)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # what it never read
                _end(process.stdin).close()
        for process in self._processes:
            process.wait()
            _end(process.stdout).close()


@contextlib.contextmanager
def bare_workers(model: str, cores: Sequence[int]) -> Iterator[BareWorkers]:
    """Give processes that have loaded `model`, until the block ends."""
    workers = BareWorkers(model, cores)
    try:
        workers.rate(len(cores), 1)
        yield workers
    finally:
        workers.close()


def _end(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _main(model: str) -> None:
    import torch
    from PIL import Image
    from transformers import AutoProcessor

    torch.set_num_threads(1)
    processor: Any = AutoProcessor.from_pretrained(model).image_processor
    data = encode_picture((1280, 720))
    for line in sys.stdin:
        started = time.perf_counter()
        for _ in range(int(line)):
            with Image.open(io.BytesIO(data)) as image:
                processor(images=[image.convert("RGB")], return_tensors="pt")
        sys.stdout.write(f"{time.perf_counter() - started}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1])
