"""What `peers.py` and `quality.py` share: the engines, the workloads, and how their processes are run."""
