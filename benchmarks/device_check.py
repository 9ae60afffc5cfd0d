#!/usr/bin/env python3
"""Whether the decoding engine is right and fast on this device: CUDA where there is any, else the CPU.

    python benchmarks/device_check.py            the shape of SmolLM2-135M and a tiny trained model, float32 and bfloat16
    python benchmarks/device_check.py --quick    few layers and short answers, for CPUs

Needs torch, transformers and pydantic (which holds the settings and comes with marsray), neither Ray nor DeepSpeed. The tiny model
is trained on the spot, so nothing is downloaded.

The oracles, by counts of rows whose tokens differ: one-token decoding against a plain argmax loop that recomputes everything;
verified decoding, whatever its window, against one-token decoding; rows in a batch against each row alone; the ragged cache and the
block cache against none. In float32 rows may differ only where the plain model's top two logits are closer than 1e-5; a row that
differs elsewhere, or a verified run of the trained model that never kept two tokens of one forward, makes the exit code 1. In
bfloat16 the counts are what was measured and fail nothing. Then the tables of
`decoding.py`, in bfloat16 on CUDA and in float32 on a CPU unless dtypes are named.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder

import torch

from benchmarks.decoding import DTYPES, add_options, fill_in, measure, subjects
from benchmarks.decoding_methods import Decoded, Engines
from benchmarks.decoding_models import Subject, random_smollm2, trained_walker
from benchmarks.decoding_oracles import Differences, argmax_loop, compare
from benchmarks.decoding_report import table
from benchmarks.decoding_work import Sizes, natural_work

ORACLE_ROWS, ORACLE_SLOTS = 12, 5
QUICK_LAYERS = 2
ORACLE_SIZES = Sizes(0, 0, 0, (10, 50), (10, 60), max_new_tokens=64)
QUICK_ORACLE_SIZES = Sizes(0, 0, 0, (6, 25), (6, 30), max_new_tokens=64)
VERIFIED: dict[str, dict[str, Any]] = {
    "verified, automatic window": {"mode": "verified", "window": "auto"},
    "verified, W = 2": {"mode": "verified", "window": 2, "draft_branches": False},
    "verified, W = 8": {"mode": "verified", "window": 8, "draft_branches": False},
    "verified, W = 4, branches": {"mode": "verified", "window": 4, "draft_branches": True},
    "verified, W = 8, branches": {"mode": "verified", "window": 8, "draft_branches": True},
}
ONE_TOKEN: dict[str, Any] = {"mode": "one_token"}
TAU: dict[str, Any] = {"mode": "tau", "threshold": 0.9}


@dataclass
class Oracles:
    """The checks of one model in one dtype: `differences` by check, `tokens_per_forward` of the runs with drafts."""

    subject: Subject
    differences: dict[str, Differences] = field(default_factory=dict)
    tokens_per_forward: dict[str, float] = field(default_factory=dict)

    def run(self, sizes: Sizes) -> None:
        """Runs all checks on ragged rows, more of them than slots."""
        work = natural_work(self.subject, ORACLE_ROWS, 0, sizes)
        engines = Engines(self.subject, ORACLE_SLOTS, work.max_length)
        alone = Engines(self.subject, 1, work.max_length)

        def check(name: str, expected: list[tuple[int, ...]], found: Decoded) -> None:
            self.differences[name] = compare(self.subject, work, expected, found.answers)

        one_token = engines.method("ragged", **ONE_TOKEN)(work)
        check("one token = plain argmax loop", argmax_loop(self.subject, work), one_token)
        check("one token: batched = alone", alone.method("ragged", **ONE_TOKEN)(work).answers, one_token)
        check("one token: ragged = none", engines.method("none", **ONE_TOKEN)(work).answers, one_token)
        check("one token: ragged = block", engines.method("block", **ONE_TOKEN)(work).answers, one_token)
        tau = engines.method("ragged", **TAU)(work)
        check("tau: batched = alone", alone.method("ragged", **TAU)(work).answers, tau)
        check("tau: ragged = none", engines.method("none", **TAU)(work).answers, tau)
        self._note("tau", tau)
        for name, settings in VERIFIED.items():
            verified = engines.method("ragged", **settings)(work)
            check(f"{name} = one token", one_token.answers, verified)
            self._note(name, verified)

    def _note(self, name: str, decoded: Decoded) -> None:
        assert decoded.statistics is not None
        self.tokens_per_forward[name] = decoded.statistics.tokens_per_forward

    def failures(self) -> Iterator[str]:
        """What is wrong in float32."""
        for name, found in self.differences.items():
            if found.num_wrong:
                yield f"{name}: {found}"
        # The automatic window may find that drafts do not pay on this device; fixed ones must keep some.
        for name in VERIFIED:
            if self.subject.is_trained and VERIFIED[name]["window"] != "auto" and self.tokens_per_forward[name] <= 1.0:
                yield f"{name}: no draft was kept, so the check says nothing"

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return str(self.subject.model.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        """Model and dtype."""
        return f"{self.subject.name}, {self.dtype}"

    def rows(self) -> list[list[Any]]:
        """One line of the table for each check."""
        return [[self.subject.name, self.dtype, name, str(found)] for name, found in self.differences.items()]

    def figures(self) -> dict[str, Any]:
        """Differing rows, rows, near-ties and widest gap of each check, and tokens per forward."""
        counts = {
            name: [found.num_differing, found.num_rows, found.num_near_ties, found.largest_gap]
            for name, found in self.differences.items()
        }
        return {"rows_with_other_tokens": counts, "tokens_per_forward": self.tokens_per_forward}


def models_to_check(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Subject]:
    """Those of the benchmark; a quick check has fewer layers, and the trained model, whose drafts are kept."""
    if options.model or not options.quick:
        return subjects(options, device, dtype)
    return [trained_walker(150, device, dtype), random_smollm2(QUICK_LAYERS, device, dtype)]


def main(arguments: list[str] | None = None) -> int:
    """Checks, measures, writes both to standard output; 1 when a float32 oracle fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is any)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="of the checks; the last one also of the speeds")
    parser.add_argument("--only-checks", action="store_true", help="no tables of speeds")
    options = parser.parse_args(arguments)
    fill_in(options)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        torch.set_num_threads(1)
    # Float32 means float32: no TF32 in matrix products.
    torch.backends.cuda.matmul.allow_tf32 = False
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    sys.stdout.write(f"{device_name}, torch {torch.__version__}\n\n")
    dtypes = options.dtypes or (["float32", "bfloat16"] if device.type == "cuda" else ["bfloat16", "float32"])
    checked: list[Oracles] = []
    for dtype in dtypes:
        models = models_to_check(options, device, DTYPES[dtype])
        for subject in models:
            checked.append(Oracles(subject))
            checked[-1].run(QUICK_ORACLE_SIZES if options.quick else ORACLE_SIZES)
    rows = [row for oracles in checked for row in oracles.rows()]
    sys.stdout.write(table(("model", "dtype", "check", "rows with other tokens"), rows))
    failures = [
        f"{oracles.name}: {failure}"
        for oracles in checked
        if oracles.subject.model.dtype == torch.float32
        for failure in oracles.failures()
    ]
    sys.stdout.write("".join(f"FAILED: {failure}\n" for failure in failures))
    sys.stdout.flush()
    values: dict[str, Any] = {"device": device_name, "failures": failures}
    values["checks"] = {oracles.name: oracles.figures() for oracles in checked}
    if not options.only_checks:
        values["speed"] = {f"{subject.name}, {dtypes[-1]}": measure(subject, options).values() for subject in models}
    sys.stdout.write(json.dumps(values) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
