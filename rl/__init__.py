"""What trainers of reinforcement learning need beside an engine.

`prefix_tokens`: the next prompt of a conversation, with the token ids that the model itself produced.
`difference`: how far an engine's log probabilities are from a trainer's.
"""
