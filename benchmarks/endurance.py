"""Memory of a server: 200 requests of 28 images at once, then a long time of mixed requests.

    python benchmarks/endurance.py                 # an hour
    python benchmarks/endurance.py --minutes 2     # to try it
    python benchmarks/endurance.py --rate 20       # leaves something to others

Writes results/endurance.json; the budgets that the server is given are in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from lazydecode.bench.endurance import EnduranceOptions, run_endurance
from lazydecode.bench.record import write_record
from lazydecode.tiny_models import build

RESULT = Path(__file__).parent / "results" / "endurance.json"


def main() -> None:
    """Measure with a tiny model, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="of mixed requests")
    parser.add_argument("--requests", type=int, default=200, help="at once")
    parser.add_argument("--images", type=int, default=28, help="in each of them")
    parser.add_argument("--rate", type=float, help="mixed requests per second, at most")
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build("qwen2_5_vl", Path(folder) / "qwen2_5_vl", weights=False)
        options = EnduranceOptions(
            str(model),
            requests=given.requests,
            images=given.images,
            soak_s=60 * given.minutes,
            soak_rate=given.rate,
        )
        record = run_endurance(options, lambda text: print(text, file=sys.stderr))
    write_record(record, given.output)
    print(f"written to {given.output}")


if __name__ == "__main__":
    main()
