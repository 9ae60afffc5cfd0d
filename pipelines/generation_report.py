"""What a generate job did: the content of `_report.json`, and the table that it prints."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines import storage
from pipelines.comparison import Comparison
from pipelines.manifest import PAGE, Totals
from pipelines.pool_usage import PoolUsage
from pipelines.reports import environment, facts_table, text_table
from pipelines.throughput import Throughput
from workers.config import GenerateRecipe

EXIT_DONE, EXIT_TOO_MANY_BAD_ROWS = 0, 3


@dataclass(frozen=True)
class GenerationReport:
    """What a job did; the content of `_report.json`.

    Attributes:
        num_rows, num_results, num_errors: rows of the set; rows with an answer; rows without. The first is the sum of the others.
        errors: the rows without an answer by error code.
        tokens_per_forward: generated tokens / forwards, sum over sum.
        query_tokens_per_token: tokens and placeholders that the model processed, prompts included / generated tokens.
        kept_per_forward: how often a forward kept 1, 2, ... tokens of a row.
        forwards_per_window: how many forwards of a row had which window.
        tokens_per_second: generated tokens of this start of the job / `seconds`.
        seconds: wall time of this start from the first ready actor to the last unit, so without loading.
        num_units, num_units_before: units of the set; those that an earlier start had finished.
        num_restarts: actors that were replaced because they had died or hung.
        actors_over_time: (seconds since the first actor was asked for, actors that are ready) at each change.
        actor_seconds: of all actors of this start, loading included.
        actor_utilisation: the share of the actor-seconds that the engines spent in steps.
        slot_occupancy: the share of the decoding slots that held a row, over all steps.
        tokens_over_time: (seconds, tokens per second) of equal spans of this start; tokens count when their unit is done.
        slowest_rows, longest_rows: the first few, by seconds from their first tokens to their last, and by tokens.
        comparison: of a share of the rows with one-token decoding, see `Comparison`.
        cost: of the actor-seconds of this start, when `price_per_actor_hour` is set.
        exit_code: 0, or 3 when more rows than `max_error_share` allows have no answer.
    """

    num_rows: int
    num_results: int
    num_errors: int
    errors: dict[str, int]
    num_prompt_tokens: int
    num_generated_tokens: int
    num_forwards: int
    num_query_tokens: int
    tokens_per_forward: float
    query_tokens_per_token: float
    kept_per_forward: dict[str, int]
    forwards_per_window: dict[str, int]
    tokens_per_second: float
    seconds: float
    num_units: int
    num_units_before: int
    num_restarts: int
    actors_over_time: list[list[float]]
    actor_seconds: float
    actor_utilisation: float
    slot_occupancy: float
    tokens_over_time: list[list[float]]
    slowest_rows: list[dict[str, Any]]
    longest_rows: list[dict[str, Any]]
    comparison: dict[str, Any]
    cost: float | None
    exit_code: int
    output: str
    settings: dict[str, Any]
    environment: dict[str, Any]

    def table(self) -> str:
        """The figures, then what forwards kept and the errors by code."""
        facts = {
            "rows": self.num_rows,
            "answers": self.num_results,
            "errors": self.num_errors,
            "tokens": self.num_generated_tokens,
            "tokens/forward": self.tokens_per_forward,
            "query tokens/token": self.query_tokens_per_token,
            "tokens/s": self.tokens_per_second,
            "seconds": self.seconds,
            "actors, most": int(max((num_ready for _, num_ready in self.actors_over_time), default=0)),
            "actor-seconds": self.actor_seconds,
            "of these decoding": self.actor_utilisation,
            "slots in use": self.slot_occupancy,
            **Comparison(**self.comparison).facts(),
            **({} if self.cost is None else {"cost": self.cost}),
            "output": self.output,
            "page": storage.join(self.output, PAGE),
        }
        kept = [(int(num_kept), count) for num_kept, count in self.kept_per_forward.items()]
        tables = [
            text_table(headers, rows)
            for headers, rows in (
                (("kept tokens", "forwards"), sorted(kept)),
                (("window", "forwards"), list(self.forwards_per_window.items())),
                (("error", "rows"), sorted(self.errors.items())),
            )
            if rows
        ]
        return "\n".join([facts_table(facts), *tables])


def make_report(
    recipe: GenerateRecipe,
    before: Totals,
    totals: Totals,
    usage: PoolUsage,
    throughput: Throughput,
    seconds: float,
    num_restarts: int,
    trace: Sequence[tuple[float, int]],
) -> GenerationReport:
    """The report of a job whose units are all done.

    Args:
        before, totals: what earlier starts had done, and everything.
        usage: of the actors in this start, and `trace` how many of them there were when.
        seconds: of this start.
    """
    num_errors, price = totals.errors.total(), recipe.price_per_actor_hour
    return GenerationReport(
        num_rows=totals.num_rows,
        num_results=totals.num_results,
        num_errors=num_errors,
        errors=dict(totals.errors),
        num_prompt_tokens=totals.num_prompt_tokens,
        num_generated_tokens=totals.num_generated_tokens,
        num_forwards=totals.num_forwards,
        num_query_tokens=totals.num_query_tokens,
        tokens_per_forward=totals.num_generated_tokens / max(1, totals.num_forwards),
        query_tokens_per_token=totals.num_query_tokens / max(1, totals.num_generated_tokens),
        kept_per_forward=dict(sorted(totals.kept_per_forward.items(), key=lambda kept: int(kept[0]))),
        forwards_per_window=dict(totals.forwards_per_window),
        tokens_per_second=(totals.num_generated_tokens - before.num_generated_tokens) / seconds,
        seconds=seconds,
        num_units=totals.num_units,
        num_units_before=before.num_units,
        num_restarts=num_restarts,
        actors_over_time=[list(change) for change in trace],
        actor_seconds=usage.actor_seconds,
        actor_utilisation=usage.utilisation,
        slot_occupancy=usage.slot_occupancy,
        tokens_over_time=throughput.over_time(),
        slowest_rows=[asdict(row) for row in totals.slowest_rows],
        longest_rows=[asdict(row) for row in totals.longest_rows],
        comparison=asdict(totals.comparison),
        cost=None if price is None else price * usage.actor_seconds / 3600,
        exit_code=exit_code(recipe, num_errors, totals.num_rows),
        output=recipe.output,
        settings=json.loads(recipe.model_dump_json()),
        environment=environment(),
    )


def exit_code(recipe: GenerateRecipe, num_errors: int, num_rows: int) -> int:
    """Of a job that has come to its end."""
    return EXIT_TOO_MANY_BAD_ROWS if num_errors > recipe.max_error_share * num_rows else EXIT_DONE
