"""The next prompt of a conversation, with the token ids that the model itself saw and produced.

Where an engine renders the conversation, `render_chat(..., required_prefix_token_ids=...)` does all of it.
"""

from __future__ import annotations

from dovetail.contracts.prompts import PrefixOutcome, PrefixVerdict
from dovetail.engine.tokenization.prefix_tokens import Decode, replace_prefix_tokens

__all__ = ["Decode", "PrefixOutcome", "PrefixVerdict", "replace_prefix_tokens"]
