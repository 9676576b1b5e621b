"""Environments of several turns: the protocol, adapters for those of other libraries, tools and the sandbox."""
