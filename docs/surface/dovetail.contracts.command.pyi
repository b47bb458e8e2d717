import typer
from abc import abstractmethod
from dovetail.contracts.plugin import Plugin


class Command(Plugin):
    @abstractmethod
    def app(self) -> typer.Typer: ...
