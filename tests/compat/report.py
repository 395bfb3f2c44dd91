"""`docs/compatibility.md` from sweeps.

python -m tests.compat.report --tp2 A.json --tp4 B.json --pp2 C.json --tp2pp2 D.json > docs/compatibility.md
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import transformers

from tests.compat.families import FAMILIES, UNBUILDABLE

HEAD = """# Compatibility

Every Hugging Face family with a text, image or audio head that builds offline from its config (transformers {hf}, torch
{torch}), and modules written by hand, without a plan: `python -m tests.compat.sweep` builds each tiny, lets
`plan="auto"` split it, and compares its own training step on real ranks with one device.

*Verified* means: loss and every gradient agree, in float64 (a few models run in float32 only), with and without a
padding mask; losses in training and in evaluation. The percentage is the share of the blocks' parameters that is not on
a rank (at most 1 - 1/tp; for stages, of all parameters). Stages run two microbatches; a loss that
couples samples (contrastive losses, BatchNorm) or sums them is compared with one device over the same microbatches.
*Refused* means that an error says what can't be done, before a wrong step is taken.

| | verified | of them with at least 40 % off each rank | refused or failed | wrong |
|---|---|---|---|---|
"""
COLUMNS = {
    "tp2": "tp=2, sequence regions",
    "tp4": "tp=4, whole sequences",
    "pp2": "pp=2",
    "tp2pp2": "tp=2 and pp=2, sequence regions",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in COLUMNS:
        parser.add_argument(f"--{name}")
    options = vars(parser.parse_args())
    found: dict[str, dict[str, Any]] = {}
    for name, path in options.items():
        if path:
            with open(path) as file:
                found[name] = {result["name"]: result for result in json.load(file)}
    print(HEAD.format(hf=transformers.__version__, torch=torch.__version__.partition("+")[0]), end="")
    for name, results in found.items():
        print(f"| {COLUMNS[name]} | {_summary(list(results.values()))} |")
    print(f"\n## {len(FAMILIES)} families\n\n| family | kind | {' | '.join(COLUMNS[name] for name in found)} |")
    print("|---|---|" + "---|" * len(found))
    for name, family in sorted(FAMILIES.items(), key=lambda item: (item[1].kind, item[0])):
        print(f"| {name} | {family.kind} | {' | '.join(_cell(results.get(name)) for results in found.values())} |")
    print("\n## Why not\n")
    for name, results in found.items():
        for result in results.values():
            if result["status"] != "verified":
                print(f"- {result['name']}, {COLUMNS[name]}: {_shortened(result['why'])}")
    print("\n## Families that are not here\n")
    for name, why in sorted(UNBUILDABLE.items()):
        print(f"- {name}: {_shortened(why)}")


def _summary(results: list[dict[str, Any]]) -> str:
    good = [r for r in results if r["status"] == "verified"]
    wrong = sum(r["status"] == "wrong" for r in results)
    share = f"{sum(r['share'] >= 0.4 for r in good)}"
    return f"{len(good)} of {len(results)} | {share} | {len(results) - len(good) - wrong} | {wrong}"


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    return f"{result['share']:.0%}" if result["status"] == "verified" else result["status"]


def _shortened(text: str) -> str:
    for what, by in (("MegaTPStrategy: ", ""), ("|", "/"), ("<", "&lt;"), ("{", "("), ("}", ")")):
        text = text.replace(what, by)
    return text if len(text) < 240 else text[:240] + "..."


if __name__ == "__main__":
    main()
