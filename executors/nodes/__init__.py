"""Workers on several machines: the driver's side (`hub`, `links`, `base`) and that of each machine (`agent`, `rank`).

An agent on each machine starts and watches its ranks. Each rank dials the driver by itself, so plans pass through no
agent.
"""
