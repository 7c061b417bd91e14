"""``pdxfer probe``: whether sparse attention selects the same tokens after a cache was moved as before.

Owns: prompts with planted needles, the two workers that hold and move their index keys, the paths that are compared, and a
tiny model that is decoded across a transfer. Must not: inject faults (chaos does) or measure speed (bench does).
"""
