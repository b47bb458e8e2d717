"""An engine in a process of its own, and its clients: ZeroMQ sockets of this machine, messages in MessagePack.

    client process                                engine process
    RemoteEngine   -- DEALER ---- requests ---->   ROUTER   IOThread   -> commands for the step loop
                   <- DEALER ---- replies  -----   ROUTER              (answered at once: metrics, health, explanations)
                   <- PULL ------ updates  -----   PUSH     step loop  (one message per step and client)

Each client has a PUSH socket of its own, so that one that does not read costs the others nothing: what it does not
take is merged, and bounded by the tokens of its requests. A client whose process dies is noticed by its connection, and
its requests are aborted. An engine that dies is noticed in the same way; clients meet the next one at the same address.
"""
