"""What ends a job without being a fault of it: something that the user can fix, or the wish that it stops."""


class InputError(ValueError):
    """A problem with what the user gave. Jobs print it and end with exit code 2.

    Args:
        where: the setting (`data.max_length`), file or row that is wrong.
        found: what was there.
        expected: what should be there.
        advice: what to do about it; may be empty.
    """

    def __init__(self, where: str, found: str, expected: str, advice: str = "") -> None:
        super().__init__(where, found, expected, advice)
        self.where = where
        self.found = found
        self.expected = expected
        self.advice = advice

    def __str__(self) -> str:
        message = f"{self.where}: found {self.found}; expected {self.expected}."
        return f"{message} {self.advice}" if self.advice else message


class Stopped(KeyboardInterrupt):
    """The user or the cluster has asked the job to end; the same command goes on from there. It says when it happened."""
