"""The engine for servers and actors: many coroutines ask, one thread decodes for all of them."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import torch

from workers.decoding.engine import DecodingEngine
from workers.decoding.request import Progress, Request, Result


class AsyncEngine:
    """Lets coroutines of one event loop share an engine. Requests join between steps, whoever asks.

    A coroutine that is cancelled, or that stops reading, takes its request out of the engine.
    """

    def __init__(self, engine: DecodingEngine) -> None:
        self._engine = engine
        self._readers: dict[int, asyncio.Queue[Progress | BaseException]] = {}
        self._arrivals: list[tuple[Request, asyncio.Queue[Progress | BaseException]]] = []
        self._departures: list[asyncio.Queue[Progress | BaseException]] = []
        self._driver: asyncio.Task[None] | None = None
        # Its own thread, so that the event loop answers while the model works; with as many threads of its own as here.
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),))

    @property
    def num_requests(self) -> int:
        """Requests that are not finished."""
        return len(self._readers) + len(self._arrivals)

    async def generate(self, request: Request) -> Result:
        """The result of a request; a bad one has an error in it.

        Raises:
            Exception: what the model raised in a step; it ends all requests that were in the engine.
        """
        async for progress in self.stream(request):
            if progress.result is not None:
                return progress.result
        raise AssertionError("a stream ends with a result")

    async def stream(self, request: Request) -> AsyncIterator[Progress]:
        """What each step brings a request; the last one has the result. Raises as `generate` does."""
        queue: asyncio.Queue[Progress | BaseException] = asyncio.Queue()
        self._arrivals.append((request, queue))
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        is_done = False
        try:
            while not is_done:
                progress = await queue.get()
                if isinstance(progress, BaseException):
                    is_done = True
                    raise progress
                is_done = progress.result is not None
                yield progress
        finally:
            if not is_done:
                self._departures.append(queue)

    async def _drive(self) -> None:
        """Steps while there is work. The engine is touched either here or in its thread, never in both."""
        loop = asyncio.get_running_loop()
        try:
            while self._admit():
                try:
                    steps = await loop.run_in_executor(self._thread, self._engine.step)
                except Exception as error:  # noqa: BLE001 - everybody who was in the step must hear of it
                    self._fail(error)
                else:
                    for progress in steps:
                        self._tell(progress)
        finally:
            self._driver = None

    def _fail(self, error: Exception) -> None:
        """Ends all requests in the engine; those that have not entered it yet start afresh."""
        for queue in self._readers.values():
            queue.put_nowait(error)
        self._readers.clear()
        self._engine.clear()

    def _admit(self) -> bool:
        """Takes in and out what has come since the last step; returns whether there is work."""
        gone, self._departures = set(map(id, self._departures)), []
        for ticket in [ticket for ticket, queue in self._readers.items() if id(queue) in gone]:
            self._engine.cancel(ticket)
            del self._readers[ticket]
        arrivals, self._arrivals = self._arrivals, []
        for request, queue in arrivals:
            if id(queue) in gone:
                continue
            try:
                ticket, refused = self._engine.submit(request)
            except Exception as error:  # noqa: BLE001 - it is the affair of who asked, and of nobody else
                queue.put_nowait(error)
                continue
            if refused is None:
                self._readers[ticket] = queue
            else:
                queue.put_nowait(Progress(ticket, (), refused))
        return self._engine.has_work

    def _tell(self, progress: Progress) -> None:
        queue = self._readers[progress.ticket]
        if progress.result is not None:
            del self._readers[progress.ticket]
        queue.put_nowait(progress)
