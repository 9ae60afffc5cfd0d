"""Random requests and engines for differential tests of decoding, and the comparison with the naive loop."""

import math
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from naive_decoding import NaiveAnswer, naive_decode
from scripted_model import ByteTokenizer
from tiny_models import MASK_ID, tiny_model

from workers.config import RowDecodingSettings
from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Progress, Request, Result, row_seed
from workers.decoding.window import WindowChoice

MODEL_TYPES = ["llama", "qwen2", "gpt2", "mistral", "qwen2_sliding", "qwen3", "smollm", "gemma2", "gemma3_text"]
MODELS = {model_type: tiny_model(model_type) for model_type in MODEL_TYPES}
TOKENIZER = ByteTokenizer()
# 0 is the models' pad id: it is an ordinary token of a prompt.
END_IDS = frozenset({0, 1, 7})
# Some prompts begin alike, by more tokens than are worth a copy.
COMMON = tuple(2 + 7 * place % 37 for place in range(45))
RUN_SEED = 5
NEAR_TIE = 1e-5


def few_examples(count: int):
    """The same examples in each run: what fails here fails everywhere. They are not made smaller, which takes minutes."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        database=None,
        phases=[Phase.generate],
    )


def make_engine(model_type: str, **changes) -> DecodingEngine:
    options = {"mask_token_id": MASK_ID, "end_ids": END_IDS, "block_size": 4, "num_slots": 3, "max_length": 48}
    return DecodingEngine(MODELS[model_type], TOKENIZER, run_seed=RUN_SEED, **(options | changes))


class RandomChooser:
    """An automatic window that means nothing: whatever is chosen, the text stays the same."""

    def __init__(self, block_size: int, random: Random) -> None:
        self._block_size, self._random = block_size, random

    def age(self) -> None:
        """It learns nothing."""

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts > 0

    def choose(self, num_rows: int, branches: bool | None = None) -> WindowChoice:
        assert num_rows > 0
        has_branches = self._random.random() < 0.5 if branches is None else branches
        return WindowChoice(self._random.randint(1, self._block_size), has_branches)


@st.composite
def engine_options(draw) -> dict:
    return {
        "block_size": draw(st.integers(1, 16)),
        "num_slots": draw(st.integers(1, 6)),
        "max_length": draw(st.sampled_from([72, 80, 128])),
        "cache_block": draw(st.integers(1, 20)),
        "prefill_chunk": draw(st.one_of(st.integers(1, 9), st.integers(10, 80))),
    }


@st.composite
def row_settings(draw, modes: tuple[str, ...] = ("one_token", "tau", "tau", "verified", "verified", "verified")):
    """Settings whose answer the naive loop knows: no automatic window in tau mode."""
    mode = draw(st.sampled_from(modes))
    score = draw(st.sampled_from(["probability", "margin", "entropy"]))
    thresholds = [0.0, 0.8, 1.7, 3.0] if score == "entropy" else [0.0, 0.2, 0.5, 1.0]
    windows = {"one_token": [None], "tau": [None, 1, 2, 3, 5, 16], "verified": [None, "auto", 1, 2, 3, 5, 8]}
    return RowDecodingSettings(
        mode=mode,
        score=score,
        threshold=draw(st.sampled_from(thresholds)) if mode == "tau" else None,
        window=draw(st.sampled_from(windows[mode])),
        draft_branches=draw(st.sampled_from([None, True, False])) if mode == "verified" else None,
        max_new_tokens=draw(st.integers(1, 14)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8, 0.3])),
        seed=draw(st.sampled_from([None, 3, 2**63 + 11])),
        stop=draw(st.sampled_from([(), (), (), ("\x05",), ("\x1f\x02", "\x10"), ("$",)])),
        min_new_tokens=draw(st.sampled_from([0, 0, 0, 3, 20])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 5.0, 0.7])),
        forbidden_ids=draw(st.sampled_from([(), (), (3, 4, 5), tuple(range(10, 30))])),
        logprobs=draw(st.booleans()),
    )


@st.composite
def requests_of(draw, min_rows: int, max_rows: int, max_prompt: int = 70, **options) -> list[Request]:
    """Rows with prompts of any tokens but the placeholder."""
    requests = []
    for place in range(draw(st.integers(min_rows, max_rows))):
        longest = draw(st.sampled_from([3, 17, max_prompt]))
        random = Random(draw(st.integers(0, 2**16)))
        prompt = tuple(random.randrange(MASK_ID) for _ in range(random.randint(1, longest)))
        if random.random() < 0.25:
            prompt = (COMMON + prompt)[: max(longest, 2)]
        requests.append(Request(f"row{place}", prompt, draw(row_settings(**options))))
    return requests


def run_with_late_requests(engine: DecodingEngine, requests: list[Request], random: Random) -> list[Result]:
    """Submits requests between steps, some at a time; the tokens that are told on the way are those of the results."""
    waiting, results, told = list(requests), {}, {}
    while waiting or engine.has_work:
        for _ in range(min(random.choice([0, 0, 1, 2, 5]), len(waiting))):
            ticket, failed = engine.submit(waiting.pop(0))
            assert failed is None
            told[ticket] = []
        if engine.has_work:
            for progress in engine.step():
                note_progress(progress, told[progress.ticket])
                if progress.result is not None:
                    results[progress.ticket] = progress.result
    return [results[ticket] for ticket in sorted(results)]


def note_progress(progress: Progress, told: list[int]) -> None:
    assert progress.token_ids
    told += progress.token_ids
    if progress.result is not None:
        assert tuple(told) == progress.result.token_ids


def naive_answer(
    model_type: str, request: Request, *, block_size: int, max_length: int, cache_block: int | None = None
):
    return naive_decode(
        MODELS[model_type],
        TOKENIZER,
        request,
        row_seed(request, RUN_SEED),
        mask_id=MASK_ID,
        end_ids=END_IDS,
        block_size=block_size,
        max_length=max_length,
        cache_block=cache_block,
    )


def equals_naive(result: Result, request: Request, answer: NaiveAnswer) -> bool:
    """Asserts equality with the naive loop; False if the row differs after a near-tie of it."""
    if list(result.token_ids) != answer.token_ids and answer.smallest_gap < NEAR_TIE:
        return False
    assert result.id == request.id
    assert list(result.token_ids) == answer.token_ids
    assert (result.text, result.finish_reason) == (answer.text, answer.finish_reason)
    assert result.num_prompt_tokens == len(request.prompt_ids)
    assert sum(kept * count for kept, count in result.kept_per_forward.items()) == len(result.token_ids)
    assert sum(result.kept_per_forward.values()) == result.num_forwards <= len(result.token_ids)
    assert sum(result.forwards_per_window.values()) == result.num_forwards
    if request.decoding.mode != "verified":
        assert result.num_forwards == answer.num_forwards or answer.smallest_gap < NEAR_TIE
    if request.decoding.logprobs:
        assert result.logprobs == pytest.approx(answer.logprobs, abs=1e-3)
        assert all(math.isfinite(logprob) for logprob in result.logprobs)
    else:
        assert result.logprobs is None
    return True
