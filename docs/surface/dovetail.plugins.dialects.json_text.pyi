from collections.abc import Iterator


class JSONReader:
    def __init__(self) -> None: ...
    is_done: bool
    is_broken: bool
    def read(self, text: str) -> tuple[str, int]: ...

def raw_items(text: str) -> Iterator[tuple[str, str]]: ...
