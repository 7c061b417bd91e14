"""The reference engine, its gateway, and the demo that breaks them.

Owns: prefill and decode workers around SmolLM2 and around a synthetic model, an OpenAI-compatible gateway, a load agent, and
``pdxfer demo``. Must not: be imported by any other part of pdxfer. It uses the sidecar through ``pdxfer.client`` alone, as
any engine would.
"""
