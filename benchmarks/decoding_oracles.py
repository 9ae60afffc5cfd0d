"""What decoded tokens must be: a plain argmax loop, and where two answers to one prompt part.

Two right computations of the same logits differ by rounding, so they may pick different tokens where the two likeliest are tied.
A difference counts as a near-tie when the plain model's top two logits are closer than `NEAR_TIE` there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.decoding_models import Subject
from benchmarks.decoding_work import Work

NEAR_TIE = 1e-5


@dataclass(frozen=True)
class Differences:
    """Rows compared, rows whose tokens differ, those of them at a near-tie, and the widest gap at which any parted."""

    num_rows: int = 0
    num_differing: int = 0
    num_near_ties: int = 0
    largest_gap: float = 0.0

    def __add__(self, other: "Differences") -> "Differences":
        return Differences(
            self.num_rows + other.num_rows,
            self.num_differing + other.num_differing,
            self.num_near_ties + other.num_near_ties,
            max(self.largest_gap, other.largest_gap),
        )

    @property
    def num_wrong(self) -> int:
        """Rows that rounding does not explain."""
        return self.num_differing - self.num_near_ties

    def __str__(self) -> str:
        if self.num_differing == 0:
            return f"0 of {self.num_rows}"
        return f"{self.num_differing} of {self.num_rows} ({self.num_near_ties} at near-ties; widest gap {self.largest_gap:.1e})"


@torch.inference_mode()
def argmax_loop(subject: Subject, work: Work) -> list[tuple[int, ...]]:
    """One row at a time, everything recomputed for each token, with the plain causal model and no mask of ours."""
    answers = []
    for prompt, budget in zip(work.prompts, work.budgets, strict=True):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + budget:
            tokens.append(int(_next_logits(subject, tokens).argmax()))
            if tokens[-1] in work.end_ids:
                break
        answers.append(tuple(tokens[len(prompt) :]))
    return answers


def compare(
    subject: Subject, work: Work, expected: Sequence[tuple[int, ...]], found: Sequence[tuple[int, ...]]
) -> Differences:
    """Row by row; the gap is looked at where a row's answers part for the first time."""
    total = Differences()
    for prompt, right, ours in zip(work.prompts, expected, found, strict=True):
        total = total + Differences(num_rows=1)
        if right == ours:
            continue
        gap = _gap(subject, prompt, right, ours)
        total = total + Differences(0, 1, int(gap < NEAR_TIE), gap)
    return total


@torch.inference_mode()
def _gap(subject: Subject, prompt: tuple[int, ...], right: tuple[int, ...], ours: tuple[int, ...]) -> float:
    """The lead of the likeliest token over the next where two answers part; infinite if one only ends before the other."""
    pairs = zip(right, ours, strict=False)
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return float("inf")
    first, second = _next_logits(subject, [*prompt, *right[:place]]).topk(2).values.tolist()
    return float(first - second)


def _next_logits(subject: Subject, tokens: list[int]) -> torch.Tensor:
    """Float32 logits (V) of the token behind; the placeholder is no candidate."""
    input_ids = torch.tensor([tokens], device=subject.device)
    logits_V = subject.model(input_ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    logits_V[subject.mask_token_id] = -torch.inf
    return logits_V
