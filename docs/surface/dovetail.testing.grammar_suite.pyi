from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.testing.grammar_forms import GrammarForms


class GrammarSuite(GrammarForms):
    def forcing(self) -> list[GrammarSpec]: ...
