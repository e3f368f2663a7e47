"""protocol: bytes in, messages out, and back. No sockets, no clock, no asyncio, no pickle.

wire            one side of a control connection: greeting, proofs, frames
handshake       proofs and keys from a shared secret
codec           frozen dataclasses <-> msgpack
line_protocol   what programs say over stdin and stdout, as lines
"""
