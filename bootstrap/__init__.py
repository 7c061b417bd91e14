"""Bootstrap: how nodes find each other and talk: keys, the registry, and the one thread with the ZeroMQ sockets.

Owns: everything between two sidecars but the transfers themselves. Must not: hold state of rooms or peers' sessions; the
core does, so that the thread can be restarted in place and nothing is lost.
"""
