"""The one exception that means "the user can fix this": bad settings, bad input, bad model folder."""


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
