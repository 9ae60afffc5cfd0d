"""How the wish to stop gets from the driver to the training workers: an actor that one tells and the other asks."""

from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class StopBoard:
    """Whether the workers of a stage have begun to train, and whether they should end."""

    def __init__(self) -> None:
        self._has_begun = self._is_stopping = False

    def begin(self) -> None:
        """The workers are about to run their first step."""
        self._has_begun = True

    def stop(self) -> bool:
        """Asks the workers to end after a step; returns whether they have begun, and so will hear it."""
        self._is_stopping = True
        return self._has_begun

    def is_stopping(self) -> bool:
        """Whether the workers should end."""
        return self._is_stopping


def start_stop_board() -> Any:
    """The actor of a `StopBoard`, beside the driver if that can be."""
    driver_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return (
        ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(StopBoard)
        .options(scheduling_strategy=driver_node)
        .remote()
    )


class StopFlag:
    """What a worker sees of the board, without ever waiting for it: what it said to the last question that it has answered.

    A board that is lost says nothing; training goes on without it.
    """

    def __init__(self, board: Any) -> None:
        self._board = board
        board.begin.remote()
        self._answer = board.is_stopping.remote()

    def __call__(self) -> bool:
        if not ray.wait([self._answer], timeout=0)[0]:
            return False
        try:
            is_stopping: bool = ray.get(self._answer)
        except RayError:
            is_stopping = False
            self._board.begin.remote()  # one that was started again does not know
        if not is_stopping:
            self._answer = self._board.is_stopping.remote()
        return is_stopping
