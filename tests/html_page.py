"""A report page taken apart, for tests of what it shows."""

from html.parser import HTMLParser

_WITHOUT_END = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A page taken apart; a tag that is not closed in its turn is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in _WITHOUT_END:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)
