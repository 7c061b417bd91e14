"""Seeded bugs: patches of the product's parts, never branches inside them. What is to catch them must.

``python -m pdxfer.chaos.mutants NAME serve …`` runs a sidecar with a bug in it, for the controls of live chaos.
"""
