#!/usr/bin/env python3
"""Peak memory of one training pass over the length of the row: logits in chunks against all logits at once.

A one-layer Llama with the vocabulary of Qwen2.5 (151,936), one row of L tokens that are all trained on, forward and backward in
float32 on the CPU. Each case runs in a process of its own; its figure is the peak resident memory beyond that of the loaded model.
What a row costs without the vocabulary (layers, masks, packing) is measured with the same model over 64 tokens; the difference is
what the loss over the vocabulary adds.
"""

import argparse
import json
import multiprocessing
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

VOCAB_SIZE, SMALL_VOCAB_SIZE = 151_936, 64
LENGTHS, QUICK_LENGTHS = (512, 1024, 2048, 4096, 8192), (512, 2048)
LONGEST_UNCHUNKED, QUICK_LONGEST_UNCHUNKED = 2048, 512  # 8192 positions would take about 15 GiB


def peak_mib(length: int, vocab_size: int, is_chunked: bool) -> float:
    """Peak resident memory of one forward and backward, less that of the loaded model, in MiB. For a process of its own."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from workers.objectives.losses import LossModule
    from workers.objectives.mars import MarsObjective
    from workers.objectives.streams import Sample

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    objective = MarsObjective(1, 1.0, 0.0, False, vocab_size - 1, seed=0)
    module = LossModule(LlamaForCausalLM(config), objective, head_chunk=None if is_chunked else length)
    sample = Sample(0, 0, 0, np.arange(length, dtype=np.int32) % (vocab_size - 1), ((1, length),))
    (batch,) = objective.pack([sample], row_tokens=length, micro_batch_rows=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module(batch, module.num_chunks_of(batch)).loss.backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main(arguments: list[str] | None = None) -> None:
    """Prints the table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter rows only")
    quick = parser.parse_args(arguments).quick
    lengths = QUICK_LENGTHS if quick else LENGTHS
    longest_unchunked = QUICK_LONGEST_UNCHUNKED if quick else LONGEST_UNCHUNKED
    rows: list[dict[str, float | None]] = []
    added: list[float] = []
    sys.stdout.write("positions  chunked MiB  without vocabulary MiB  difference MiB  unchunked MiB  all logits MiB\n")
    for length in lengths:
        chunked, small = (_in_a_process(length, size, True) for size in (VOCAB_SIZE, SMALL_VOCAB_SIZE))
        unchunked = _in_a_process(length, VOCAB_SIZE, False) if length <= longest_unchunked else None
        added.append(chunked - small)
        logits = (length - 1) * VOCAB_SIZE * 4 / 2**20
        rows.append(
            {"positions": length, "chunked_mib": chunked, "small_vocabulary_mib": small, "unchunked_mib": unchunked}
        )
        shown = "not run" if unchunked is None else f"{unchunked:.0f}"
        sys.stdout.write(
            f"{length:9d}  {chunked:11.0f}  {small:22.0f}  {added[-1]:14.0f}  {shown:>13}  {logits:14.0f}\n"
        )
        sys.stdout.flush()
    result = {"vocab_size": VOCAB_SIZE, "rows": rows, "added_growth": round(added[-1] / added[0], 2)}
    sys.stdout.write(json.dumps(result) + "\n")


def _in_a_process(length: int, vocab_size: int, is_chunked: bool) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return round(pool.apply(peak_mib, (length, vocab_size, is_chunked)), 1)


if __name__ == "__main__":
    main()
