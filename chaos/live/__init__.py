"""Chaos against real processes: real sidecars, real NIXL, real signals, and a verdict that holds every row of the wedge contract."""
