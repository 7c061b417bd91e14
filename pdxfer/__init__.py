"""pdxfer: the transfer layer of disaggregated LLM serving."""

__version__ = "0.1.0"
