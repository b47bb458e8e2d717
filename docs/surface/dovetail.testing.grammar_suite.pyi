from dovetail.contracts.grammar import GrammarSpec
from dovetail.testing.grammar_forms import GrammarForms


class GrammarSuite(GrammarForms):
    def forcing(self) -> list[GrammarSpec]: ...
