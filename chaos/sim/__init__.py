"""A deterministic world for many real Nodes: one seed is one run.

``python -m pdxfer.chaos.sim --seed N`` replays a run and prints its timeline. Owns: virtual time, network, engines,
workers and faults, and the invariants that they check. Must not: contain a line of the product; the Node is the real one.
"""
