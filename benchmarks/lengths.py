"""Samples with the lengths of a real data set and random tokens: what a training step costs depends on lengths alone.

The table was measured once from the 7473 training rows of GSM8K (github.com/openai/grade-school-math), each as two chat turns in
the template of SmolLM2-135M-Instruct, with its tokenizer: the prompt ends where the answer begins (default system turn and
answer heading included), the response ends with its end-of-turn token.
"""

import numpy as np

from workers.objectives.streams import Sample

LEVELS = (
    0.0,
    0.01,
    0.02,
    0.05,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.75,
    0.8,
    0.85,
    0.9,
    0.95,
    0.98,
    0.99,
    1.0,
)
PROMPT_QUANTILES = (42, 57, 59, 63, 67, 69, 72, 75, 77, 81, 86, 91, 98, 101, 106, 112, 120, 131, 148, 160, 253)
RESPONSE_QUANTILES = (31, 48, 52, 59, 66, 73, 79, 85, 91, 102, 114, 129, 145, 154, 166, 179, 200, 233, 268, 293, 455)
LONG_PROMPT_FACTOR = 4


def random_samples(count: int, seed: int, *, vocab_size: int, long_prompts: bool = False) -> list[Sample]:
    """Samples of one turn. Ids are below `vocab_size - 1`, which is left for the placeholder.

    Prompt and response lengths are drawn independently (in the data they correlate by 0.5, which would mean more padding for a
    layout that pads). With `long_prompts` each prompt is four times as long as its response.
    """
    generator = np.random.default_rng(seed)
    responses = np.interp(generator.random(count), LEVELS, RESPONSE_QUANTILES).round().astype(int)
    prompts = np.interp(generator.random(count), LEVELS, PROMPT_QUANTILES).round().astype(int)
    if long_prompts:
        prompts = LONG_PROMPT_FACTOR * responses
    return [
        Sample(
            file=0,
            row=row,
            epoch=0,
            token_ids=generator.integers(0, vocab_size - 1, size=prompt + response).astype(np.int32),
            responses=((int(prompt), int(prompt + response)),),
        )
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
