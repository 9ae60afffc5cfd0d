"""The oracle of the decoding engine: one row at a time, everything recomputed at each step, loops over single numbers."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from workers.config import RowDecodingSettings
from workers.decoding.request import Request

_MASK_64 = (1 << 64) - 1


@dataclass
class NaiveAnswer:
    """`smallest_gap` is the closest that any decision came to a tie: between two tokens, or of a score and its threshold."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    num_forwards: int = 0
    smallest_gap: float = math.inf


def naive_decode(
    model: PreTrainedModel,
    tokenizer,
    request: Request,
    seed: int,
    *,
    mask_id: int,
    end_ids: frozenset[int],
    block_size: int,
    max_length: int,
    cache_block: int | None = None,
) -> NaiveAnswer:
    """The answer; in verified mode that of one-token decoding. With `cache_block` no forward keeps tokens of two blocks."""
    settings = request.decoding
    window = (settings.window or block_size) if settings.mode == "tau" else 1
    budget = min(settings.max_new_tokens, max_length - len(request.prompt_ids))
    answer = NaiveAnswer()
    while len(answer.token_ids) < budget:
        clean = [*request.prompt_ids, *answer.token_ids]
        width = min(window, budget - len(answer.token_ids))
        if cache_block is not None:
            width = min(width, cache_block - len(answer.token_ids) % cache_block)
        with torch.no_grad():
            logits = model(torch.tensor([clean + [mask_id] * (width - 1)]), use_cache=False).logits[0].double().numpy()
        answer.num_forwards += 1
        for place in range(width):
            row = logits[len(clean) - 1 + place].copy()
            _penalise(row, [*request.prompt_ids, *answer.token_ids], settings.repetition_penalty)
            is_early = len(answer.token_ids) < settings.min_new_tokens
            row[[mask_id, *settings.forbidden_ids, *(end_ids if is_early else ())]] = -math.inf
            scores = _candidates(row, settings, answer)
            token = _pick(scores, settings, seed, len(answer.token_ids), answer)
            if place > 0 and not _accepts(row, token, settings, answer):
                break
            answer.token_ids.append(token)
            largest = max(scores.values())
            total = sum(math.exp(score - largest) for score in scores.values())
            answer.logprobs.append(scores[token] - largest - math.log(total))
            if _ends(answer, tokenizer, settings, end_ids):
                return answer
    answer.text = tokenizer.decode(answer.token_ids)
    return answer


def _penalise(logits, seen: list[int], penalty: float) -> None:
    """The rule of transformers."""
    for token in set(seen):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty


def _ends(answer: NaiveAnswer, tokenizer, settings: RowDecodingSettings, end_ids: frozenset[int]) -> bool:
    """Whether the last token ends the answer; its text is then that of the answer."""
    if answer.token_ids[-1] in end_ids:
        answer.text, answer.finish_reason = tokenizer.decode(answer.token_ids[:-1]), "stop"
        return True
    text = tokenizer.decode(answer.token_ids)
    places = [text.find(stop) for stop in settings.stop if stop in text]
    if places:
        answer.text, answer.finish_reason = text[: min(places)], "stop"
    return bool(places)


def _candidates(logits, settings: RowDecodingSettings, answer: NaiveAnswer) -> dict[int, float]:
    """The tokens that may be chosen, and the logits of the distribution that they are drawn from; all of them for a greedy row."""
    scores = {token: float(logit) for token, logit in enumerate(logits) if logit > -math.inf}
    if settings.temperature == 0:
        return scores
    scores = {token: logit / settings.temperature for token, logit in scores.items()}
    ranked = sorted(scores, key=lambda token: (-scores[token], token))
    if settings.top_k:
        _note_gap(scores, ranked[settings.top_k - 1 : settings.top_k + 1], answer)
        ranked = ranked[: settings.top_k]
    if settings.top_p < 1:
        weights = [math.exp(scores[token] - scores[ranked[0]]) for token in ranked]
        kept, mass = [], 0.0
        for token, weight in zip(ranked, weights, strict=True):
            if kept and mass >= settings.top_p:
                break
            if kept:
                answer.smallest_gap = min(answer.smallest_gap, abs(mass - settings.top_p))
            kept.append(token)
            mass += weight / sum(weights)
        answer.smallest_gap = min(answer.smallest_gap, abs(mass - settings.top_p))
        ranked = kept
    return {token: scores[token] for token in ranked}


def naive_pick(logits, settings: RowDecodingSettings, seed: int, position: int, answer: NaiveAnswer) -> int:
    """The token that is chosen from logits in which forbidden tokens are -inf."""
    return _pick(_candidates(logits, settings, answer), settings, seed, position, answer)


def _pick(
    scores: dict[int, float], settings: RowDecodingSettings, seed: int, position: int, answer: NaiveAnswer
) -> int:
    if settings.temperature > 0:
        scores = {token: score + naive_gumbel(seed, position, token) for token, score in scores.items()}
    ranked = sorted(scores, key=lambda token: (-scores[token], token))
    _note_gap(scores, ranked[:2], answer)
    return ranked[0]


def _note_gap(scores: dict[int, float], ranked: list[int], answer: NaiveAnswer) -> None:
    if len(ranked) == 2:
        answer.smallest_gap = min(answer.smallest_gap, scores[ranked[0]] - scores[ranked[1]])


def _accepts(logits, token: int, settings: RowDecodingSettings, answer: NaiveAnswer) -> bool:
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    if settings.score == "entropy":
        score = -sum(p * math.log(p) for p in probabilities if p > 0)
        is_accepted = score <= settings.threshold and settings.threshold > 0
    else:
        first, second = sorted(probabilities, reverse=True)[:2]
        score = probabilities[token] if settings.score == "probability" else first - second
        is_accepted = score >= settings.threshold and settings.threshold < 1
    answer.smallest_gap = min(answer.smallest_gap, abs(score - settings.threshold))
    return is_accepted


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK_64
    return x ^ (x >> 31)


def naive_gumbel(seed: int, position: int, token: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = _mix((_mix((seed + golden) & _MASK_64) + position) & _MASK_64)
    bits = (key ^ _mix((token + golden) & _MASK_64)) * 0xFF51AFD7ED558CCD & _MASK_64
    bits = (bits ^ (bits >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK_64
    return -math.log(-math.log1p(-((bits >> 11) + 0.5) * 2.0**-53))
