from abc import ABC, abstractmethod


class MayWait(ABC):
    @abstractmethod
    def why_it_waits(self) -> str | None: ...
