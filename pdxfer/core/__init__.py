"""The pure core: every decision of a node, and nothing that touches the world.

Owns: rooms, the ledger of pages and slots, peers' sessions, tombstones, deadlines.
Must not: read a clock, open a socket, start a thread, draw a random number, or import zmq, nixl, torch or asyncio.
Everything comes in through ``Node.handle(event, now)`` and goes out as the list of actions that it returns.
"""
