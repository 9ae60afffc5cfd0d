#!/usr/bin/env python3
"""Speed of a MARS training step against the published layout and against AR SFT, and what the data pipeline adds.

    python benchmarks/training.py            the shape of SmolLM2-135M
    python benchmarks/training.py --quick    fewer layers of the same width and vocabulary, within three minutes on two cores

Plain torch in one process, one thread, float32, on the CPU; random weights and random tokens with the lengths of GSM8K
(`benchmarks/lengths.py`). A step is packing or padding, forward and backward of all micro-batches of its samples, and one AdamW
update of all weights. The methods take turns on the same samples. Seconds are CPU seconds of the process, which has one busy
thread: on an idle machine the same as wall-clock seconds (shown beside them), on a shared one without the share of others. The
last line of the output is one JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from any folder

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import published_layout
from benchmarks.data_wait import DataWait, measure_data_wait
from benchmarks.lengths import LONG_PROMPT_FACTOR, random_samples
from benchmarks.memory import peak_memory_mb, reset_peak_memory
from benchmarks.positions import NUM_DRAWS, NUM_SAMPLES, count_packed, count_published
from pipelines.reports import facts_table, text_table
from workers.objectives.losses import LossModule
from workers.objectives.mars import MarsObjective
from workers.objectives.streams import Sample

VOCAB_SIZE = 49152
MASK_TOKEN_ID = VOCAB_SIZE - 1
NUM_LAYERS, QUICK_LAYERS = 30, 4
BLOCK_SIZE = 8
PUBLISHED, MARS, SFT = "published layout", "MARS", "AR SFT"
# Positions of one forward are alike: 2 published samples of 2 x 216 tokens on average, 2 packed rows of at most 512. Larger
# micro-batches would pad the published layout more: with 2 of 8 it pads as much as with 4 of the 32 samples of a usual step.
PUBLISHED_ROWS = 2
ROW_TOKENS, MICRO_BATCH_ROWS = 512, 2
LENGTHS = {False: "GSM8K", True: f"prompt = {LONG_PROMPT_FACTOR} x response"}


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: CPU seconds, wall-clock seconds, the losses per response token, and the positions of its forwards."""

    seconds: float
    wall_seconds: float
    ar_loss: float
    mask_loss: float
    positions: int
    padding: int


Method = Callable[[Sequence[Sample]], StepResult]


def small_llama(num_layers: int) -> PreTrainedModel:
    """SmolLM2-135M with random weights, or with fewer of its layers."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def packed_method(model: PreTrainedModel, optimizer: torch.optim.Optimizer, objective: MarsObjective) -> Method:
    """A step of our own code: MARS, or AR SFT as blocks of one."""
    module = LossModule(model, objective)

    def step(samples: Sequence[Sample]) -> StepResult:
        watch = Stopwatch()
        batches = objective.pack(samples, row_tokens=ROW_TOKENS, micro_batch_rows=MICRO_BATCH_ROWS)
        count = sum(batch.num_response_tokens for batch in batches)
        ar_sum = mask_sum = 0.0
        for batch in batches:
            sums = module(batch, module.num_chunks_of(batch))
            (sums.loss / count).backward()
            ar_sum, mask_sum = ar_sum + float(sums.ar_sum), mask_sum + float(sums.mask_sum)
        _update(optimizer)
        padding = sum(batch.num_padding for batch in batches)
        positions = padding + sum(batch.num_tokens for batch in batches)
        return StepResult(*watch.seconds(), ar_sum / count, mask_sum / count, positions, padding)

    return step


def published_method(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Method:
    """A step in the published layout with the same losses and weights (blocks begin where the response begins)."""

    def step(samples: Sequence[Sample]) -> StepResult:
        watch = Stopwatch()
        count = sum(end - begin for sample in samples for begin, end in sample.responses)
        ar_sum = mask_sum = 0.0
        positions = 0
        for members in published_layout.sorted_batches(samples, PUBLISHED_ROWS):
            batch = published_layout.collate(members, BLOCK_SIZE)
            sums = published_layout.loss_sums(model, batch, MASK_TOKEN_ID)
            ((sums.ar_sum + sums.mask_sum) / count).backward()
            ar_sum, mask_sum = ar_sum + float(sums.ar_sum.detach()), mask_sum + float(sums.mask_sum.detach())
            positions += 2 * batch.token_ids_SL.numel()
        _update(optimizer)
        padding = positions - 2 * sum(len(sample.token_ids) for sample in samples)
        return StepResult(*watch.seconds(), ar_sum / count, mask_sum / count, positions, padding)

    return step


class Stopwatch:
    """CPU and wall-clock seconds since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def seconds(self) -> tuple[float, float]:
        """CPU seconds, wall-clock seconds."""
        return time.process_time() - self._cpu, time.perf_counter() - self._wall


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


class Comparison:
    """Repeated steps of several methods on the same samples, in turns.

    Args:
        methods: by name.
        num_samples: samples of a step.
        long_prompts: prompts four times as long as responses, instead of GSM8K's.
    """

    def __init__(self, methods: dict[str, Method], num_samples: int, long_prompts: bool) -> None:
        self._methods, self._num_samples, self.long_prompts = methods, num_samples, long_prompts
        self.results: dict[str, list[StepResult]] = {name: [] for name in methods}
        self.num_response_tokens: list[int] = []
        self.peak_mb: dict[str, float] = {}

    def run(self, num_repeats: int) -> None:
        """One step with a single sample to warm up, then the repeats; every repeat has samples of its own."""
        for method in self._methods.values():
            method(self._samples(seed=0)[:1])
        for repeat in range(1, num_repeats + 1):
            samples = self._samples(seed=repeat)
            self.num_response_tokens.append(sum(end - begin for s in samples for begin, end in s.responses))
            names = list(self._methods)
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                reset_peak_memory()
                self.results[name].append(self._methods[name](samples))
                self.peak_mb[name] = max(self.peak_mb.get(name, 0.0), peak_memory_mb())

    def _samples(self, seed: int) -> list[Sample]:
        return random_samples(self._num_samples, seed, vocab_size=VOCAB_SIZE, long_prompts=self.long_prompts)

    def ratios(self, slow: str, fast: str) -> list[float]:
        """Seconds of `slow` by seconds of `fast`, for each repeat: both had the same samples."""
        pairs = zip(self.results[slow], self.results[fast], strict=True)
        return [slower.seconds / faster.seconds for slower, faster in pairs]

    def padding_share(self, name: str) -> float:
        """Of all positions that the method ran through the model."""
        results = self.results[name]
        return sum(each.padding for each in results) / sum(each.positions for each in results)

    def rows(self) -> list[list[Any]]:
        """One line of the table for each method."""
        rows = []
        for name, results in self.results.items():
            speeds = [tokens / each.seconds for tokens, each in zip(self.num_response_tokens, results, strict=True)]
            seconds = [each.seconds for each in results]
            positions = sum(each.positions for each in results) / sum(self.num_response_tokens)
            rows.append(
                [
                    LENGTHS[self.long_prompts],
                    name,
                    statistics.median(speeds),
                    f"{min(speeds):.1f}..{max(speeds):.1f}",
                    statistics.median(seconds),
                    statistics.median(each.wall_seconds for each in results),
                    positions,
                    self.padding_share(name),
                    round(self.peak_mb[name]),
                ]
            )
        return rows


HEADERS = (
    "lengths",
    "method",
    "response tokens/s",
    "min..max",
    "CPU seconds a step",
    "wall",
    "positions/response token",
    "padding",
    "peak MB",
)


def positions_table() -> str:
    """What each layout runs through the model per sample: no clock involved."""
    rows = []
    for long_prompts in (False, True):
        counts = {
            PUBLISHED: count_published(long_prompts=long_prompts, micro_batch_rows=PUBLISHED_ROWS),
            MARS: count_packed(BLOCK_SIZE, ROW_TOKENS, MICRO_BATCH_ROWS, long_prompts=long_prompts),
            SFT: count_packed(1, ROW_TOKENS, MICRO_BATCH_ROWS, long_prompts=long_prompts),
        }
        rows += [[LENGTHS[long_prompts], name, *(round(value, 1) for value in count)] for name, count in counts.items()]
    headers = ("lengths", "method", "positions", "padding among them", "positions of the head")
    return f"per sample, mean of {NUM_DRAWS} steps of {NUM_SAMPLES} samples\n" + text_table(headers, rows)


def report(usual: Comparison, long: Comparison, wait: DataWait) -> tuple[str, dict[str, Any]]:
    """The text for people, and the object of the last line."""
    comparisons = {
        "speedup_vs_published_layout": usual.ratios(PUBLISHED, MARS),
        "speedup_long_prompts": long.ratios(PUBLISHED, MARS),
        "cost_vs_sft_step": usual.ratios(MARS, SFT),
    }
    medians = {name: round(statistics.median(ratios), 3) for name, ratios in comparisons.items()}
    spread = {
        name: f"{medians[name]:.3f}  ({min(ratios):.3f}..{max(ratios):.3f})" for name, ratios in comparisons.items()
    }
    facts = {
        **spread,
        "data_wait_share": f"{wait.share:.5f}  ({wait.num_steps} steps; the first batch took {wait.first_seconds:.1f} s)",
        "samples/s the stream can give": f"{wait.samples_per_second:.0f}",
    }
    text = (
        text_table(HEADERS, usual.rows() + long.rows()) + "\nmedian (min..max) over the repeats\n" + facts_table(facts)
    )
    values = {
        **medians,
        "data_wait_share": round(wait.share, 5),
        "padding_share": round(usual.padding_share(MARS), 4),
        "peak_memory_mb": {name: round(megabytes) for name, megabytes in usual.peak_mb.items()},
    }
    return text, values


def main(arguments: list[str] | None = None) -> None:
    """Measures and writes the table and the JSON line to standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers instead of {NUM_LAYERS}")
    parser.add_argument("--samples", type=int, help="samples of a step; by default 8, or 4 with --quick")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each method and length")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    num_layers = QUICK_LAYERS if options.quick else NUM_LAYERS
    num_samples = options.samples or (4 if options.quick else 8)
    model = small_llama(num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    mars = packed_method(model, optimizer, MarsObjective(BLOCK_SIZE, 1.0, 1.0, True, MASK_TOKEN_ID, seed=0))
    sft = packed_method(model, optimizer, MarsObjective(1, 1.0, 0.0, False, MASK_TOKEN_ID, seed=0))
    published = published_method(model, optimizer)
    sys.stdout.write(
        f"Llama of width 576, vocabulary {VOCAB_SIZE}, {num_layers} layers; block size {BLOCK_SIZE}; "
        f"{num_samples} samples a step ({num_samples // 2} with long prompts), {options.repeats} repeats; float32, one thread\n"
    )
    if options.quick:
        sys.stdout.write(
            "quick: with few layers the head weighs more than in the whole model, which favours the layout that runs it at fewer "
            "positions; the figures to quote are those of the full run\n"
        )
    sys.stdout.write("\n" + positions_table() + "\n")
    sys.stdout.flush()
    usual = Comparison({PUBLISHED: published, MARS: mars, SFT: sft}, num_samples, long_prompts=False)
    usual.run(options.repeats)
    long = Comparison({PUBLISHED: published, MARS: mars}, num_samples // 2, long_prompts=True)
    long.run(options.repeats)
    wait = measure_data_wait(lambda samples: mars(samples).wall_seconds, num_samples, VOCAB_SIZE, quick=options.quick)
    text, values = report(usual, long, wait)
    sys.stdout.write(text + json.dumps(values) + "\n")


if __name__ == "__main__":
    main()
