"""Every comparison in one run: `make bench`, or

    python -m tests.benchmarks [--only tensor pipeline] [--add FILE] [--quick] [--write]

Sizes and rows are in `sizes.toml`. `--write` puts tables and picture into docs/performance.md. What is found is printed
line by line; `--add` takes such lines of runs of other parts before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"


def parts(quick: bool) -> dict[str, Callable[[], Iterator[Any]]]:
    """What to measure, in order."""
    from tests.benchmarks import alone, data, gpu, optimizer, pipeline, single, start, tensor
    from tests.benchmarks.layer import LayerSize
    from tests.benchmarks.models import Size

    settings = tomllib.loads((HERE / "sizes.toml").read_text())

    def sizes(part: str) -> list[Size]:
        found = [Size(**size) for size in settings[part]["sizes"]]
        return [dataclasses.replace(s, rounds=1, steps=min(s.steps, 5)) for s in found[:1]] if quick else found

    t, p, o = settings["tensor"], settings["pipeline"], settings["optimizer"]
    rounds = 1 if quick else None
    small = Size(**p["python"])
    if quick:
        small = dataclasses.replace(small, rounds=1, steps=5)
    g = settings["gpu"]
    bench = gpu.Bench(
        **{**g, **{kind: LayerSize(**g[kind]) for kind in ("layer", "batch")}, "model": Size(**g["model"])}
    )
    if quick:
        bench = dataclasses.replace(bench, rounds=1, steps=5)
    return {
        "tensor": lambda: tensor.rows(sizes("tensor"), t["sequence"], t["tp"]),
        "alone": lambda: alone.rows(sizes("tensor"), t["sequence"], t["tp"]),
        "pipeline": lambda: pipeline.rows(sizes("pipeline"), p["microbatches"], p["pp"], small),
        "data": lambda: data.rows(sizes("data"), settings["data"]["dp"]),
        "single": lambda: single.rows(sizes("single")),
        "optimizer": lambda: optimizer.rows(o["parameters"], o["width"], o["tp"], rounds or o["rounds"], o["steps"]),
        "start": lambda: start.rows(sizes("start"), settings["start"]["tp"], rounds or settings["start"]["rounds"]),
        "gpu": lambda: gpu.rows(bench),
    }


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.benchmarks.report import PARTS, tables, write
    from tests.ranks import pools

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--add", type=Path, help="lines that a run of other parts printed")
    parser.add_argument("--quick", action="store_true", help="one size and few steps: whether it runs at all")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    arguments = parser.parse_args()
    found = [] if arguments.add is None else [*map(_read, arguments.add.read_text().splitlines())]
    for name, measure in parts(arguments.quick).items():
        for row in measure() if name in arguments.only else ():
            found.append(row)
            print(json.dumps(dataclasses.asdict(row)), flush=True)
    pools.close()
    print(tables(found))
    if arguments.write:
        write(found, DOCS / "performance.md", DOCS / "images" / "performance.png")


def _read(line: str) -> Any:
    from tests.benchmarks.ratios import Figure, Ratio, Row

    fields = json.loads(line)
    return Row(**{**fields, "ratio": Ratio(**fields["ratio"])}) if "ratio" in fields else Figure(**fields)


if __name__ == "__main__":
    main()
