"""How often the rows of each entry of `data.train` are used: exact counts from closed forms, without looking at rows.

The rows of a prepared part are used round-robin, in an order of the part's own that is fixed for the run. With `n` rows and
weight `w`, the uses of all epochs before epoch `e` are the first `floor(n e w + phase)` of that cycle. So after any number of
epochs two rows of a part differ by at most one use; `w = 1` is each row once in an epoch, and `w = 1/2` once in two of them.

A phase in [0, 1) makes the parts round at different epochs: without it, an entry of a hundred files of one row each at weight
0.1 would be left out of nine epochs and be used as a whole in the tenth. Phases are the seeded permutation of `j / parts of the
entry`, so the total of an entry of equal parts is `floor(rows e w)` too (Hermite's identity).
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from pipelines.sft_data import PreparedIndex

_PHASES_STREAM = 3  # 0 to 2 are those of the sample order


@dataclass(frozen=True)
class Share:
    """The weight of one prepared part and the phase in which it rounds."""

    weight: Fraction
    phase: Fraction

    def num_uses_before(self, epoch: int, num_rows: int) -> int:
        """Uses of all rows of the part in the epochs before this one: `floor(num_rows * epoch * weight + phase)`."""
        weight, phase = self.weight, self.phase
        numerator = num_rows * epoch * weight.numerator * phase.denominator + phase.numerator * weight.denominator
        return numerator // (weight.denominator * phase.denominator)


ONCE = Share(Fraction(1), Fraction(0))


def shares_of(index: PreparedIndex, seed: int) -> tuple[Share, ...]:
    """The share of each part of the index."""
    shares: dict[int, Share] = {}
    for number, (source, parts) in enumerate(zip(index.sources, _parts_of(index), strict=True)):
        sequence = np.random.SeedSequence((seed, number, _PHASES_STREAM))
        phases = np.random.Generator(np.random.Philox(sequence)).permutation(len(parts)).tolist()
        for part, phase in zip(parts, phases, strict=True):
            shares[part] = Share(source.weight, Fraction(phase, len(parts)))
    return tuple(shares[part] for part in range(len(index.parts)))


def describe_sources(index: PreparedIndex) -> list[dict[str, Any]]:
    """For the report: path, weight, good rows and (on average) samples per epoch of each entry of `data.train`."""
    described = []
    for source, parts in zip(index.sources, _parts_of(index), strict=True):
        num_rows = sum(index.parts[part].num_rows for part in parts)
        samples = round(float(num_rows * source.weight), 2)
        described.append(
            {"path": source.path, "weight": float(source.weight), "rows": num_rows, "samples_per_epoch": samples}
        )
    return described


def _parts_of(index: PreparedIndex) -> list[list[int]]:
    """The numbers of the parts that belong to each source."""
    owners = {file: number for number, source in enumerate(index.sources) for file in source.files}
    members: list[list[int]] = [[] for _ in index.sources]
    for number, part in enumerate(index.parts):
        members[owners[index.files[part.file]]].append(number)
    return members
