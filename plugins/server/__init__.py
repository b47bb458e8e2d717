"""The HTTP server: an app made of routes over an `EngineClient`. Routes use these modules, as docs/routes.md says:

bodies      JSON bodies as msgspec Structs, with errors that name the field
sampling    the fields of `SamplingParams` in a request, and the parameters they make
streams     several prompts of one request, submitted together and read together
sse         frames of server-sent events
usage       counts of tokens as clients read them
"""
