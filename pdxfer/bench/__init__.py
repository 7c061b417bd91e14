"""``pdxfer bench``: rooms between two sidecars, measured against plain NIXL in the same run.

Owns: the measurement. Must not: be imported by anything but its command. Everything runs in processes of their own, as in a deployment: two
sidecars with their engines, a worker on each, and for plain NIXL an initiator and a target.
"""
