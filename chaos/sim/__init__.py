"""A deterministic world for many real Nodes: one seed is one run.

``pdxfer chaos sim`` runs many seeds, ``pdxfer chaos replay`` prints one as a timeline. Owns: virtual time, network, engines,
workers and faults, and the invariants that they check. Must not: contain a line of the product; the Node is the real one.
"""
