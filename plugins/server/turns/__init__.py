"""One turn of an assistant: what chat, responses and messages share.

messages    a conversation in OpenAI's form, checked, as chat templates read it
tools       tools and the choice among them
formats     response formats as expressions of a dialect's grammar
turn        a turn rendered, and the parameters of its request
reading     events of a completion, in deltas or whole
"""
